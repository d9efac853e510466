"""Rewards: the plugin interface, discovery by entry points, the server with its worker processes, and the client."""
