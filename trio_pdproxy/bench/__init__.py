"""Measuring an endpoint as its clients see it: a load, what came of each request, and the figures over all."""
