"""Networks of others changed where they stand: `reversible_`, `ordinary_`, `chunk_loss_` and `inplace_abn_`."""
