"""A plant's hub as a consumer. The hub itself imports `tables`; only `consumer` needs the extra `plant`."""
