"""Where engines come from while the proxy serves: for now the configuration file, watched."""
