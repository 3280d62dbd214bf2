"""Messages between processes: their encoding, the sockets, and who may use these."""
