"""Several engines behind one address, and over one file: replicas on Ray."""
