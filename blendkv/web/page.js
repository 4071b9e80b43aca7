// Ctrl-Enter (Cmd-Enter) anywhere runs the comparison; what is going on is announced to screen readers, and on a narrow
// screen, where it is far below, scrolled to. Stop says at once that it was heard: what the run says comes after it.
() => {
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      const run = document.querySelector("#bk-run");
      if (run && !run.disabled) run.click();
    }
  });
  document.documentElement.style.scrollPaddingBottom = "5rem"; // what has the focus is not behind the narrow screen's bar
  const status = document.querySelector("#bk-status");
  if (status) {
    status.setAttribute("role", "status");
    status.setAttribute("aria-live", "polite");
    document.querySelector("#bk-run").addEventListener("click", () => {
      if (window.innerWidth < 700) status.scrollIntoView({ block: "start" });
    });
    document.querySelector("#bk-stop").addEventListener("click", () => {
      const said = status.querySelector(".bk-status");
      if (said && said.textContent.endsWith("...")) said.textContent = "Stopping at the next token ...";
    });
  }
}
