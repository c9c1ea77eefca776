"""`make screenshots`: the pictures of the dashboard in docs/img, of the demo's own line."""
