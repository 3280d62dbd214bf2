"use strict";
// Part `episodes`: episodes of evaluations with their videos or conversations, and filters.

/** Filters by part id, kept while a page that is open draws the part anew. */
const episodeChoices = new Map();
/** Episodes that are drawn at once; characters and turns of a conversation that are shown closed. */
const EPISODES_AT_ONCE = 12, TEXT_SHOWN = 600, TURNS_SHOWN = 8;

const EPISODE_FILTERS = [
  {key: "evaluation", label: "evaluation", of: (one) => one.evaluation},
  {key: "version", label: "version", of: (one) => String(one.version)},
  {key: "mode", label: "actions", of: (one) => one.mode},
  {key: "task", label: "task", of: (one) => one.task},
  {key: "outcome", label: "outcome", of: (one) => episodeOutcome(one)},
];

function episodeOutcome(one) {
  if (one.success === null) return "not measured";
  return one.success ? "success" : "no success";
}

PARTS.episodes = function (part, box) {
  const choice = episodeChoices.get(part.id) || {search: "", shown: EPISODES_AT_ONCE};
  episodeChoices.set(part.id, choice);
  const count = element("p", {class: "soft", "aria-live": "polite"});
  const cards = element("div", {class: part.entries.some((one) => one.turns) ? "episodes talk" : "episodes"});
  const more = element("button", {type: "button", class: "more"}, "Show more");
  const bar = element("div", {class: "filters"});

  function matching() {
    const words = choice.search.toLowerCase();
    return part.entries.filter((one) =>
      EPISODE_FILTERS.every(({key, of}) => !choice[key] || of(one) === choice[key]) &&
      (!words || episodeWords(one).includes(words)));
  }

  function draw() {
    const found = matching();
    const successes = found.filter((one) => one.success).length;
    const measured = found.some((one) => one.success !== null);
    count.textContent = `${found.length} of ${part.entries.length} episodes` +
      (measured && found.length ? `, ${successes} of them successful` : "");
    cards.replaceChildren(...found.slice(0, choice.shown).map(episodeCard));
    more.hidden = found.length <= choice.shown;
  }

  function changed() {
    choice.shown = EPISODES_AT_ONCE;
    draw();
  }

  for (const {key, label, of} of EPISODE_FILTERS) {
    const values = [...new Set(part.entries.map(of))];
    if (key === "version") values.sort((a, b) => b - a);
    if (!values.includes(choice[key])) choice[key] = "";
    if (values.length < 2) continue;
    const select = element("select", {"aria-label": `${label} of the episodes`},
      element("option", {value: ""}, "all"), ...values.map((value) => element("option", {value}, value)));
    select.value = choice[key];
    select.addEventListener("change", () => { choice[key] = select.value; changed(); });
    bar.append(element("label", {}, `${label} `, select));
  }
  if (part.entries.some((one) => one.turns)) {
    const search = element("input", {type: "search", "aria-label": "text in the conversations", placeholder: "text"});
    search.value = choice.search;
    search.addEventListener("input", () => { choice.search = search.value; changed(); });
    bar.append(element("label", {}, "search ", search));
  }
  if (part.entries.some((one) => one.video?.type.startsWith("video/"))) {
    bar.append(button("play all", "play or pause the videos that are shown", () => {
      const players = [...cards.querySelectorAll("video")], paused = players.every((player) => player.paused);
      for (const player of players) paused ? player.play() : player.pause();
    }));
  }
  more.addEventListener("click", () => { choice.shown += EPISODES_AT_ONCE; draw(); });
  box.append(bar, count, cards, more);
  draw();
  return {};
};

function episodeWords(one) {
  const said = (one.turns || []).map((turn) => `${turn.message} ${turn.reply}`).join(" ");
  return `${one.task} ${one.instruction} ${one.seed} ${one.prompt || ""} ${said}`.toLowerCase();
}

function episodeCard(one) {
  const outcome = episodeOutcome(one);
  const tone = one.success === null ? "plain" : one.success ? "good" : "bad";
  const numbers = [outcome];
  if (one.return !== null) numbers.push(`return ${+one.return.toPrecision(4)}`);
  if (one.length) numbers.push(`${one.length} steps`);
  for (const [name, value] of Object.entries(one.metrics)) numbers.push(`${name} ${+value.toPrecision(4)}`);
  const title = one.instruction && one.instruction !== one.task ? `${one.task}: ${one.instruction}` : one.task;
  const where = `${one.evaluation}, version ${one.version}, ${one.mode}, seed ${one.seed}` +
    (one.sample ? `, sample ${one.sample}` : "");
  return element("article", {class: `episode ${tone}`},
    ...(one.video ? [episodeMedia(one.video, `${title}: ${outcome}`)] : []),
    element("h4", {}, title),
    element("p", {class: "outcome"}, numbers.join(" · ")),
    ...(one.failure ? [element("p", {class: "notice"}, one.failure)] : []),
    element("p", {class: "soft"}, where),
    ...(one.turns ? [episodeTalk(one)] : []));
}

function episodeMedia(video, label) {
  const url = "url" in video ? video.url : `gallery/${video.name}`; // without one: of the server of polyrhythm watch
  if (!url) return element("p", {class: "absent soft"}, "The video is left out of this file.");
  if (video.type.startsWith("image/")) return element("img", {src: url, alt: label, loading: "lazy"});
  const player = element("video",
    {src: url, "aria-label": label, controls: "", loop: "", playsinline: "", preload: "metadata"});
  player.muted = true;
  return player;
}

function episodeTalk(one) {
  const turns = one.turns.map((turn, place) => element("div", {class: "turn"},
    episodeText(place === one.turns.length - 1 && !turn.reply ? "answer" : "policy", turn.message),
    ...(turn.reply ? [episodeText("environment", turn.reply)] : [])));
  const talk = element("div", {class: "talk"}, episodeText("prompt", one.prompt), ...turns.slice(0, TURNS_SHOWN));
  if (turns.length > TURNS_SHOWN) {
    talk.append(element("details", {},
      element("summary", {}, `${turns.length - TURNS_SHOWN} more turns`), ...turns.slice(TURNS_SHOWN)));
  }
  return talk;
}

function episodeText(who, text) {
  const said = element("div", {class: `said ${who}`}, element("b", {}, who));
  if (text.length <= TEXT_SHOWN) {
    said.append(element("span", {}, text));
  } else {
    said.append(element("details", {}, element("summary", {}, `${text.slice(0, TEXT_SHOWN)}…`),
      element("span", {}, text.slice(TEXT_SHOWN))));
  }
  return said;
}
