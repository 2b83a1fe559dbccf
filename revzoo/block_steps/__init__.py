"""Blocks of other people's networks as steps of a reversible chain, while the network's own code goes on calling them."""
