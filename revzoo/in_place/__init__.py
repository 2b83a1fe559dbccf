"""Networks of others changed where they stand: `reversible_`, `ordinary_` and `chunk_loss_`."""
