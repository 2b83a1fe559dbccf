"""Pretrained ordinary networks become reversible ones: one file per source, two-way where the coupling allows it."""
