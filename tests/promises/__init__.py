"""`make promises`: breaks the lines of code that keep promises, one by one, and lists breaks that no test notices."""
