"""The plant's pages in the dashboard's frame. They read the hub's database, write nothing and ask no line."""
