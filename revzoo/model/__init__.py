"""The network that a spec describes: the module itself, building it from a spec, and creating it with weights."""
