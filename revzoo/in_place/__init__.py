"""Networks of others changed where they stand: `reversible_`, `ordinary_` and `inplace_abn_`."""
