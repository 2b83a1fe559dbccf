"""Make pretrained ordinary networks reversible, and write their weights back for the library they came from."""
