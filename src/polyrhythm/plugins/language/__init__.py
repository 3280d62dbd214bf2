"""Language models as policies, text environments, conversations and the Python tool."""
