/* Before the page is drawn, so that it never flashes in the other colours. */
const theme = localStorage.getItem("theme");
if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
