"""`bateleur bench`: compare engines in interleaved rounds, and each with the memory bandwidth of the machine."""
