"""The engines as the proxy sees them: their connections, their coordinates, their health, their places."""
