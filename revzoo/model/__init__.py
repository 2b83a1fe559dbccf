"""The network that a spec describes: its layout, its inputs, and how one is built or created."""
