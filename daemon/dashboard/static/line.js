/* The page Line: a tone when a board fails, where this browser's user wants one; a kiosk's clock, and its reload. */
"use strict";

(() => {
  const button = document.getElementById("sound");
  let audio = null;
  let heard = boardOf();

  function boardOf() {
    const shown = document.querySelector(".andon[data-board]");
    return shown ? `${shown.dataset.board} ${shown.dataset.verdict}` : "";
  }
  function isOn() {
    return localStorage.getItem("sound") === "on";
  }
  function name() {
    const waits = isOn() && (!audio || audio.state !== "running");
    button.setAttribute("aria-pressed", String(isOn()));
    button.textContent = `Sound on a fail: ${isOn() ? "on" : "off"}${waits ? " (press any key once)" : ""}`;
  }
  /* Browsers play sound only after a person has touched the page; a kiosk with
     --autoplay-policy=no-user-gesture-required plays it at once. */
  async function wake() {
    if (!isOn()) return;
    audio ||= new AudioContext();
    await Promise.race([audio.resume(), new Promise((done) => setTimeout(done, 200))]);
    name();
  }
  function beep() {
    if (!audio || audio.state !== "running") return;
    for (const at of [0, 0.35]) {
      const tone = audio.createOscillator();
      const volume = audio.createGain();
      tone.frequency.value = 660;
      volume.gain.setValueAtTime(0.25, audio.currentTime + at);
      volume.gain.exponentialRampToValueAtTime(0.001, audio.currentTime + at + 0.3);
      tone.connect(volume).connect(audio.destination);
      tone.start(audio.currentTime + at);
      tone.stop(audio.currentTime + at + 0.3);
    }
    button.dataset.played = String(Number(button.dataset.played || 0) + 1);
  }
  button.addEventListener("click", () => {
    localStorage.setItem("sound", isOn() ? "off" : "on");
    wake();
    name();
  });
  for (const kind of ["pointerdown", "keydown"]) document.addEventListener(kind, () => audio?.state !== "running" && wake());
  document.addEventListener("live:andon", () => {
    const now = boardOf();
    if (now !== heard && now.endsWith(" fail") && isOn()) beep();
    heard = now;
  });

  /* A restarted web process may have another version: a kiosk, which nobody touches, then reloads its page. */
  let run = "";
  document.addEventListener("live:run", ({ detail }) => {
    if (run && run !== detail && document.body.classList.contains("kiosk")) location.reload();
    run = detail;
  });
  /* Seconds that go on tell a live screen from a frozen one. */
  const clock = document.getElementById("clock");
  function tick() {
    clock.textContent = FORMATS.time.format(new Date());
  }
  if (clock) {
    tick();
    setInterval(tick, 1000);
  }
  name();
  wake();
})();
