// html[data-theme="auto"]: the API reference follows the theme of the system.
const dark = matchMedia("(prefers-color-scheme: dark)");
const follow = () => {
  const theme = document.documentElement.dataset.theme;
  document.documentElement.classList.toggle("dark-mode", theme === "dark" || (theme === "auto" && dark.matches));
};
follow();
dark.addEventListener("change", follow);
