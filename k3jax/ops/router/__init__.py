"""The router: which experts a token visits, and with which weights."""
