/* The page Review. It keeps the next images ready with their pictures loaded; a decision is kept here until the daemon
   has stored it. */
"use strict";

(() => {
  const place = document.getElementById("review");
  if (!place) return;
  const HELD = 5;
  const EMPTY_AGAIN_MS = 4000;
  const HOLD_AGAIN_MS = 25000; // images shown here are offered to others last, for a minute each time
  const DOUBLE_TAP_MS = 250;
  const SIDES = [0, 1, 2, 3]; // of a box: left, top, right, bottom
  const SKIPPED = 200; // as many as the server takes at once
  const SKIPPED_MS = 12 * 3600 * 1000; // a skipped image comes last for a shift
  const find = (id) => document.getElementById(id);
  const stage = find("review-stage");
  const note = find("review-note");
  const { seat, query, reviewer } = place.dataset;

  const queue = []; // images that come next: {id, node}
  const undoable = []; // decisions of this page: {id, newest, name}
  let current = null;
  let unsent = null; // a request that was not stored, to be tried again: {path, fields, then}
  let isSending = false;
  let isFilling = false;
  let isChoosing = false; // the reviewer failed an image for which the line names no defect
  let shownAt = 0;
  let again = null;
  let skips = []; // what this reviewer skipped, the longest ago first: [image, time]
  let isUnread = false; // the problem that is shown is that the next images could not be read
  let marking = null; // boxes are being changed: {svg, before, size, selected, label, drag}
  let counted = 0; // decisions counted here: numbers asked for before one are old

  const inZone = (text) => text.replace(/\d{4}-\d\d-\d\dT[\d:.]+Z/g, (at) => FORMATS.full.format(new Date(at)));

  /* Return the skipped images, with `id` as the newest if it is given. A reload and another page keep them. */
  function skipped(id) {
    const key = `coserve-skips ${reviewer}`;
    try {
      skips = JSON.parse(localStorage.getItem(key)) || [];
    } catch {
      // A browser that keeps nothing: they are remembered until the page is reloaded.
    }
    skips = skips.filter(([image, at]) => image !== id && Date.now() - at < SKIPPED_MS);
    if (id) skips = [...skips, [id, Date.now()]].slice(-SKIPPED);
    try {
      localStorage.setItem(key, JSON.stringify(skips));
    } catch {}
    return skips.map(([image]) => image);
  }
  async function ask(path, options = {}) {
    const answer = await fetch(path, { ...options, headers: { Accept: "application/json" } });
    const text = await answer.text();
    let body;
    try {
      body = JSON.parse(text);
    } catch {
      body = { code: "refused", reason: text.trim() || `status ${answer.status}` };
    }
    return { ok: answer.ok, status: answer.status, body };
  }

  /* What comes next */
  function build({ id, html }) {
    const box = document.createElement("div");
    box.innerHTML = html; // rendered and escaped by the server; its pictures begin to load here
    return { id, node: box.querySelector("article") };
  }
  async function refill() {
    clearTimeout(again);
    if (isFilling || document.hidden) return;
    isFilling = true;
    const before = counted;
    const held = [current, ...queue].filter(Boolean).map((one) => one.id);
    const count = Math.max(0, HELD - queue.length);
    try {
      const more = new URLSearchParams({ seat, held: held.join(","), skipped: skipped().join(","), count });
      const { ok, body } = await ask(`/review/next?${query ? query + "&" : ""}${more}`);
      if (!ok) throw new Error(body.reason);
      const known = new Set([current, ...queue].filter(Boolean).map((one) => one.id));
      for (const item of body.items) if (!known.has(item.id)) queue.push(build(item));
      if (counted === before) progress(body);
      if (isUnread) complain(""); // other problems stay until the reviewer acts
      if (!current) next();
    } catch (error) {
      if (!unsent) {
        complain("The next images cannot be read", `${error.message}. Retrying automatically.`);
        isUnread = true;
      }
    } finally {
      isFilling = false;
      again = setTimeout(refill, queue.length ? HOLD_AGAIN_MS : EMPTY_AGAIN_MS);
    }
  }
  function next() {
    show(queue.shift() || null);
    if (queue.length < HELD - 1) refill();
  }
  function show(item) {
    current = item;
    isChoosing = false;
    marking = null;
    place.classList.remove("marking");
    note.value = "";
    stage.classList.remove("compare");
    stage.replaceChildren(...(item ? [item.node] : []));
    find("review-empty").hidden = Boolean(item);
    for (const button of place.querySelectorAll("[data-decide], .code, #review-skip, #review-other button"))
      button.disabled = !item || item.node.dataset.finished !== "yes";
    if (item) {
      fit(item.node);
      zoomTo(1);
      settle(item.node);
      if (item.node.dataset.copiedLater === "yes") setTimeout(() => current === item && renew(item.id), 1000);
    }
    nameFail();
    shownAt = Date.now();
  }
  async function renew(id) {
    const { ok, body } = await ask(`/review/items/${id}`);
    if (ok) show(build(body));
    return ok;
  }
  function fit(node) {
    const picture = node.querySelector(".review-picture img");
    if (picture) node.style.setProperty("--ratio", picture.getAttribute("width") / picture.getAttribute("height"));
    for (const img of node.querySelectorAll("img"))
      img.addEventListener("error", () => {
        const gone = document.createElement("p");
        gone.className = "no-picture";
        gone.textContent = "No image: it was pruned meanwhile, or cannot be shown.";
        img.closest(".picture")?.replaceWith(gone);
      });
    node.querySelector(".review-reference")?.addEventListener("click", compare);
  }
  function progress({ left, left_is_least: isLeast, done, done_by_you: own }) {
    find("review-left").textContent = isLeast ? `${left} or more` : left;
    find("review-done").textContent = done;
    sayOwn(own);
  }
  function sayOwn(own) {
    find("review-you").dataset.own = own;
    find("review-you").textContent = find("review-done").textContent === "0" ? "" : ` (${own} by you)`;
  }
  function say(text) {
    find("review-said").textContent = text;
  }
  function complain(title, text = "", canRetry = false) {
    isUnread = false;
    find("review-problem").hidden = !title;
    find("review-problem-title").textContent = title;
    find("review-problem-text").textContent = inZone(text);
    find("review-retry").hidden = !canRetry;
  }
  function called(code) {
    return place.querySelector(`.code[data-code="${CSS.escape(code)}"] strong`)?.textContent || code;
  }
  function nameFail() {
    const own = current && current.node.dataset.defect;
    find("review-fail").textContent = isChoosing ? "No code" : own ? `Fail: ${called(own)}` : "Fail";
    find("review-codes").classList.toggle("choosing", isChoosing);
  }

  /* Deciding */
  async function send(request) {
    if (isSending) return;
    isSending = true;
    place.classList.add("sending");
    let answer;
    try {
      answer = await ask(request.path, { method: "POST", body: new URLSearchParams(request.fields) });
    } catch (error) {
      answer = { ok: false, status: 0, body: { code: "unreachable", reason: "the dashboard does not answer" } };
    }
    isSending = false;
    place.classList.remove("sending");
    if (answer.ok) {
      unsent = null;
      complain("");
      await request.then(answer.body);
    } else await refused(request, answer);
  }
  async function refused(request, { status, body }) {
    const reason = `${body.reason || "no reason was given"}.`;
    unsent = null;
    if (status === 409) {
      const here = await renew(request.id).catch(() => false);
      complain(body.code === "conflict" ? "Somebody else has decided" : "Not stored", reason + (here ? " The page shows the current state." : ""));
    } else if (status === 404) {
      complain("This image is gone", reason);
      if (current && current.id === request.id) next();
    } else if (status === 422) complain("Not stored", reason);
    else {
      unsent = request;
      complain(`Not stored: ${request.label}`, `${reason} Your decision is kept here.`, true);
    }
  }
  function decide(verdict, defect = "") {
    if (!current || isSending || current.node.dataset.finished !== "yes") return;
    if (marking) endMarking(true);
    const { id, node, boxes } = current;
    const name = node.dataset.name;
    const label = defect ? `${verdict}, ${called(defect)}` : verdict;
    send({
      id,
      label: `${name} ${label}`,
      path: `/review/items/${id}`,
      fields: { verdict, defect, note: note.value, newest: node.dataset.newest, ...boxes },
      then: (stored) => {
        undoable.push({ id, newest: stored.review_id, name });
        say(`${name}: ${label}, stored. Undo takes it back.`);
        count(-1, 1);
        if (current && current.id === id) next();
      },
    });
  }
  function count(left, done) {
    for (const [id, by] of [["review-left", left], ["review-done", done]]) {
      const text = find(id).textContent;
      if (/^\d+$/.test(text)) find(id).textContent = Math.max(0, Number(text) + by);
    }
    counted += 1;
    const { own } = find("review-you").dataset;
    if (own) sayOwn(Math.max(0, Number(own) + done)); // people undo decisions of their own
  }
  function fail() {
    if (!current) return;
    if (marking) endMarking(true);
    const { defect } = current.node.dataset;
    if (defect) decide("fail", defect);
    else if (isChoosing) decide("fail");
    else {
      isChoosing = true;
      nameFail();
      const how = place.querySelector("[data-code]") ? "Choose one" : "Write its code";
      say(`Which defect? ${how}, or the same again for none.`);
    }
  }
  function skip() {
    if (!current || isSending || marking) return;
    const { id, node } = current;
    unsent = null;
    complain("");
    skipped(id);
    say(`${node.dataset.name}: skipped, it comes last.`);
    next();
  }
  async function undo() {
    if (isSending || marking) return;
    let last = undoable[undoable.length - 1];
    if (!last) {
      const { ok, body } = await ask("/review/last").catch(() => ({ ok: false }));
      if (!ok || !body.id) {
        say("There is nothing of today to undo.");
        return;
      }
      last = { id: body.id, newest: body.newest, name: `image ${body.id}` };
    }
    send({
      id: last.id,
      label: `undo of ${last.name}`,
      path: `/review/items/${last.id}/undo`,
      fields: { newest: last.newest },
      then: async () => {
        if (undoable[undoable.length - 1] === last) undoable.pop();
        count(1, -1);
        if (current && current.id !== last.id) queue.unshift(current);
        const at = queue.findIndex((one) => one.id === last.id);
        if (at >= 0) queue.splice(at, 1);
        await renew(last.id);
        say(`${last.name}: undone. It stands as before.`);
      },
    });
  }
  function retry() {
    if (unsent) send(unsent);
  }

  /* Looking */
  function zoomTo(factor) {
    const picture = stage.querySelector(".review-picture");
    if (!picture) return;
    stage.dataset.zoom = factor;
    if (factor === 1) return;
    const rect = picture.querySelector("svg rect");
    const drawn = picture.querySelector(".picture");
    if (!drawn) return;
    const size = drawn.querySelector("svg").viewBox.baseVal;
    const at = rect ? rect.getBBox() : { x: 0, y: 0, width: size.width, height: size.height };
    const x = ((at.x + at.width / 2) / size.width) * drawn.offsetWidth;
    const y = ((at.y + at.height / 2) / size.height) * drawn.offsetHeight;
    picture.scrollTo(x - picture.clientWidth / 2, y - picture.clientHeight / 2);
    wider(drawn, `${100 * factor}vw`);
    picture.focus({ preventScroll: true });
  }
  function wider(drawn, sizes) {
    const image = drawn.querySelector("img");
    if (image && image.srcset) image.sizes = sizes; // the browser fetches more of the picture's pixels where it has more
  }
  function zoom() {
    const now = Number(stage.dataset.zoom || 1);
    zoomTo(now === 4 ? 1 : now * 2);
  }
  function compare() {
    const picture = stage.querySelector(".review-picture");
    const good = stage.querySelector(".review-reference .picture");
    if (!picture || !good) {
      say("There is no image of a good part to compare with.");
      return;
    }
    zoomTo(1);
    const isOn = stage.classList.toggle("compare");
    picture.querySelector(".good")?.remove();
    if (!isOn) return;
    const beside = document.createElement("div");
    beside.className = "good";
    beside.append(good.cloneNode(true));
    wider(beside, "50vw");
    picture.append(beside);
  }

  /* Marking: boxes are rectangles in a copy of the picture's svg, in pixels of the image, named by their labels. */
  const inPixels = (onScreen) => (onScreen * marking.size[0]) / marking.svg.clientWidth;
  function mark() {
    if (marking) return endMarking(true);
    const before = stage.querySelector(".review-picture > .picture svg");
    const label = stage.querySelector("[data-label]")?.dataset.label;
    if (!before || !label) return say(before ? "There is no label to give: no detector answered, and the rules have no defect codes." : "There is no image to mark.");
    const size = ["width", "height"].map((name) => before.viewBox.baseVal[name]);
    marking = { svg: before.cloneNode(false), before, size, label };
    before.replaceWith(marking.svg);
    const rects = before.querySelectorAll(before.querySelector(".drawn") ? ".drawn" : "rect");
    rects.forEach((rect) => draw(cornersOf(rect), rect.ariaLabel));
    place.classList.add("marking");
    select(null);
  }
  function endMarking(isKept) {
    const boxes = [...marking.svg.children].map((rect) => ({ label: rect.ariaLabel, box: cornersOf(rect) }));
    if (isKept) current.boxes = { boxes: JSON.stringify(boxes) };
    else marking.svg.replaceWith(marking.before);
    select(null);
    marking = null;
    place.classList.remove("marking");
    say(isKept ? `Boxes: ${boxes.length}. They are stored with your decision.` : "The boxes are as before.");
  }
  function draw(box, label = marking.label) {
    const rect = marking.svg.appendChild(document.createElementNS(marking.svg.namespaceURI, "rect"));
    Object.assign(rect, { tabIndex: 0, ariaLabel: label });
    rect.classList.add("drawn");
    change(rect, box);
    return rect;
  }
  function select(rect, label = rect ? rect.ariaLabel : marking.label) {
    Object.assign(marking, { selected: rect, label });
    if (rect) rect.ariaLabel = label;
    for (const button of stage.querySelectorAll("[data-label]")) button.ariaPressed = button.dataset.label === label;
    (rect || stage.querySelector(".review-picture")).focus();
  }
  function cornersOf(rect) {
    const [x, y, width, height] = ["x", "y", "width", "height"].map((name) => Number(rect.getAttribute(name)));
    return [x, y, x + width, y + height].map((value) => Math.round(10 * value) / 10);
  }
  /* Put `rect` at `box`, some of its sides moved `by` pixels, as far as the image reaches. */
  function change(rect, box, sides = [], by = []) {
    const moved = box.map((at, side) => at + (sides.includes(side) ? by[side % 2] : 0));
    const [x1, y1, x2, y2] = moved.map((at, side) => Math.min(Math.max(at, 0), marking.size[side % 2]));
    const [width, height] = [x2 - x1, y2 - y1].map((length) => Math.max(Math.abs(length), 1));
    const attributes = { x: Math.min(x1, x2), y: Math.min(y1, y2), width, height };
    Object.entries(attributes).forEach(([name, value]) => rect.setAttribute(name, value));
  }
  /* Take the selected box, or those of its sides that are near; elsewhere begin a new one. */
  function press(event) {
    if (!event.isPrimary) return drop(event);
    const { left, top } = marking.svg.getBoundingClientRect();
    const [x, y] = [event.clientX - left, event.clientY - top].map(inPixels);
    const reach = inPixels(event.pointerType === "mouse" ? 8 : 18);
    const box = marking.selected ? cornersOf(marking.selected) : [];
    const isOn = x > box[0] - reach && x < box[2] + reach && y > box[1] - reach && y < box[3] + reach;
    const near = SIDES.filter((side) => Math.abs((side % 2 ? y : x) - box[side]) < reach);
    if (isOn) marking.drag = { rect: marking.selected, box, sides: near.length ? near : SIDES, start: event };
    else marking.drag = { rect: draw([x, y, x, y]), box: [x, y, x, y], sides: [2, 3], start: event, isNew: true };
    marking.svg.setPointerCapture(event.pointerId);
  }
  function pull({ isPrimary, movementX, movementY, clientX, clientY }) {
    const { rect, box, sides, start } = marking.drag || {};
    if (!isPrimary) stage.querySelector(".review-picture").scrollBy(-movementX, -movementY);
    else if (rect) change(rect, box, sides, [clientX - start.clientX, clientY - start.clientY].map(inPixels));
  }
  function drop({ type, clientX, clientY }) {
    const { rect, box, isNew } = marking.drag || {};
    if (!rect) return;
    marking.drag = null;
    if (type !== "pointerup") return isNew ? rect.remove() : change(rect, box);
    const { width, height } = rect.getBoundingClientRect();
    if (!isNew || Math.min(width, height) > 6) return select(rect);
    rect.remove(); // a tap: of the boxes that are there, the smallest
    const under = document.elementsFromPoint(clientX, clientY).filter((each) => each.matches(".drawn"));
    select(under.sort((a, b) => a.getBBox().width - b.getBBox().width)[0] || null);
  }
  function nudge(event) {
    const by = { ArrowLeft: [-4, 0], ArrowRight: [4, 0], ArrowUp: [0, -4], ArrowDown: [0, 4] }[event.key];
    if (!by) return;
    event.preventDefault();
    change(event.target, cornersOf(event.target), event.shiftKey ? [2, 3] : SIDES, by.map(inPixels));
  }
  const pointing = { pointerdown: press, pointermove: pull, pointerup: drop, pointercancel: drop };
  const touchstart = (event) => event.preventDefault(); // else the tap after a swipe only ends its fling
  for (const [type, act] of Object.entries({ ...pointing, touchstart, keydown: nudge, focusin: ({ target }) => select(target) }))
    stage.addEventListener(type, (event) => marking?.svg.contains(event.target) && act(event));

  /* Keys and taps */
  const once = (act) => (event) => event.repeat || act(event);
  const both = (key, act) => [key, key.toUpperCase()].forEach((one) => addKey(one, once(act)));
  both("p", () => decide("pass"));
  both("f", fail);
  both("x", () => decide("unknown"));
  both("s", skip);
  both("u", undo);
  both("r", retry);
  both("z", zoom);
  both("c", compare);
  both("n", () => note.focus());
  both("b", mark);
  both("h", () => document.documentElement.classList.toggle("no-boxes"));
  both("a", () => marking && select(draw([0.4, 0.4, 0.6, 0.6].map((share, side) => share * marking.size[side % 2]))));
  addKey("Delete", () => marking && select(marking.selected?.remove() || null));
  addKey("Escape", () => marking && endMarking(false));
  const codes = [...place.querySelectorAll(".code")];
  for (let at = 0; at < 9; at += 1)
    addKey(String(at + 1), once(() => (marking ? stage.querySelectorAll("[data-label]") : codes)[at]?.click()));
  for (const button of codes) button.addEventListener("click", () => decide("fail", button.dataset.code));
  place.addEventListener("click", ({ target }) => {
    const { label, press } = target.closest("[data-label], [data-press]")?.dataset || {};
    if (label) select(marking.selected, label);
    else if (Date.now() - shownAt > DOUBLE_TAP_MS) keys.get(press)?.({});
  });
  find("review-other").addEventListener("submit", (event) => {
    event.preventDefault();
    const code = find("review-code").value.trim();
    if (!code) return;
    find("review-code").value = "";
    find("review-code").blur();
    decide("fail", code);
  });
  note.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    note.blur();
  });
  stage.addEventListener("dblclick", (event) => !marking && event.target.closest(".review-picture") && zoom());
  window.addEventListener("beforeunload", (event) => unsent && event.preventDefault());
  document.addEventListener("visibilitychange", () => !document.hidden && refill());

  if (place.dataset.image)
    renew(place.dataset.image)
      .then((ok) => ok || complain("There is no such image", `Image ${place.dataset.image}: its results may have been pruned.`))
      .finally(refill);
  else refill();
})();
