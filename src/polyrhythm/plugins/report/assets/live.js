"use strict";
// Polls the server of `polyrhythm watch` and applies what changed to the page's data.

/** Milliseconds between two polls, and the longest wait while the server does not answer. */
const POLL_MS = 2000, POLL_MOST_MS = 30000;

/** Applies changes of increments.py to the data; objects on their way are replaced, so that unchanged parts stay the same. */
function applyChanges(data, changes) {
  const whole = [data];
  for (const change of changes) {
    const keys = [0, ...change.at];
    const last = keys.pop();
    let holder = whole;
    for (const key of keys) holder = holder[key];
    if ("append" in change) holder[last] = holder[last].slice(0, change.keep).concat(change.append);
    else if ("drop" in change) delete holder[last];
    else holder[last] = change.set;
  }
  return whole[0];
}

function startLive(data) {
  let state = data.live;
  const bar = element("p", {class: "live", role: "status"});
  document.body.prepend(bar);
  let wait = POLL_MS, busy = false;

  function tell(words, tone) {
    if (bar.textContent !== words) bar.textContent = words;
    bar.className = `live ${tone}`;
  }

  async function poll() {
    if (busy) return; // two answers to one state would both be applied
    busy = true;
    try {
      const answer = await fetch(`data.json?after=${encodeURIComponent(state)}`, {cache: "no-store"});
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const found = await answer.json();
      if (found.data) data = found.data;
      else if (found.changes.length) data = applyChanges(data, found.changes);
      if (found.state !== state) showPage(data);
      state = found.state;
      wait = POLL_MS;
      if (found.trouble) tell(found.trouble, "trouble");
      else tell(data.runs.every((run) => run.finished) ? "The run is finished." : "Live: this page refreshes itself.", "");
    } catch (error) {
      wait = Math.min(2 * wait, POLL_MOST_MS);
      tell("polyrhythm watch does not answer; the page shows the last state.", "trouble");
    } finally {
      busy = false;
    }
  }

  async function loop() {
    for (;;) {
      await new Promise((resolve) => setTimeout(resolve, wait));
      if (!document.hidden) await poll();
    }
  }
  document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
  tell("Live: this page refreshes itself.", "");
  loop();
}
startLive(page.data);
