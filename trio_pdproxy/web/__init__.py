"""The client's side: the Quart app, its ordinary routes, and the connection class that serves the relay paths."""
