"""`coserve-plus` (docs/how-it-schedules.md): `demand` orders loads and batches; executors pull, loaders run ahead."""
