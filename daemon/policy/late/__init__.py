"""`coserve-plus` (docs/architecture.md): `demand` orders loads and batches; executors pull, loaders run ahead."""
