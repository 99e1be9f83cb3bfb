"""How it is learnt: losses, the one loop, and the two phases."""
