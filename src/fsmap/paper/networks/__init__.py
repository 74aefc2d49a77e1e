"""Small networks: figures of the paper."""
