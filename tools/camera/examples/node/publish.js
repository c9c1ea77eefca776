// Publishes a folder of images, BOARD_TYPE/SERIAL/DESIGNATOR.COMPONENT.png, and prints an account of the answers.
//
//   npm install
//   node publish.js tcp://127.0.0.1:5570 camera-1 pictures
//
// What a publisher has to do is all here: stay within the credit, send again what is not answered, wait when the
// daemon is busy, and forget an image only when it was accepted (or a duplicate, which was accepted before).
// Exit status: 0 the daemon holds every image, 1 it refused some or does not answer, 2 wrong use.

import {readdir, readFile} from "node:fs/promises";
import path from "node:path";
import {Dealer} from "zeromq";
import {frames, keys, read} from "./line.js";

const SILENCE_MS = 5_000; // without an answer for so long, an image is sent again
const PATIENCE_MS = 60_000; // without any answer at all for so long, we give up
const now = () => performance.now(); // never Date: somebody may set that clock

class Publisher {
  account = {sent: 0, accepted: 0, duplicate: 0, rejected: 0, busy: 0, resent: 0};
  #open = new Map(); // id → {message, due, wasSent}
  #credit = 0; // nothing until the daemon's welcome says more
  #maxPayload = 64 * 2 ** 20;
  #heard = now();
  #changed = () => {};

  constructor(endpoint, source) {
    this.source = source;
    this.socket = new Dealer({linger: 0, sendHighWaterMark: 0, ...keys()}); // the credit is the limit
    this.socket.connect(endpoint);
    this.sending = this.socket.send(frames({type: "hello", source}));
    this.listening = this.#listen();
  }

  // Send one image. Waits while the credit is used up.
  async publish(header, payload) {
    while (this.#open.size >= this.#credit) await this.#step();
    this.account.sent += 1;
    if (payload.length > this.#maxPayload) return this.#reject(header.id, "too_large", "more than the daemon takes");
    if (this.#open.size === 0) this.#heard = now();
    const message = frames({...header, type: "inspect", source: this.source}, payload);
    this.#open.set(header.id, {message, due: now(), wasSent: false});
    this.#sendDue();
  }

  // Wait until every image has its answer.
  async finish() {
    while (this.#open.size > 0) await this.#step();
  }

  async close() {
    this.socket.close();
    await this.listening;
  }

  // Wait for an answer, or until something is to be sent again.
  async #step() {
    if (now() - this.#heard > PATIENCE_MS) {
      throw new Error("no daemon answers: is the daemon running, is this its endpoint, is our key allowed?");
    }
    const due = Math.min(now() + 500, ...[...this.#open.values()].map((image) => image.due));
    let timer;
    await new Promise((resolve) => {
      this.#changed = resolve;
      timer = setTimeout(resolve, Math.max(1, due - now()));
    });
    clearTimeout(timer);
    this.#sendDue();
  }

  #sendDue() {
    for (const image of this.#open.values()) {
      if (image.due > now()) continue;
      this.account.resent += image.wasSent ? 1 : 0;
      image.wasSent = true;
      image.due = now() + SILENCE_MS;
      // One send at a time, as the library wants it.
      this.sending = this.sending.then(() => this.socket.send(image.message)).catch(() => {});
    }
  }

  async #listen() {
    for await (const [, header] of this.socket) {
      this.#take(read(header));
      this.#changed();
    }
  }

  #take(answer) {
    this.#heard = now();
    this.#credit = answer.credit ?? 1;
    if (answer.type === "welcome") this.#maxPayload = answer.max_payload_bytes;
    const image = this.#open.get(answer.id);
    if (!image) return; // the welcome, or the second answer to what was sent twice
    if (answer.type === "busy") {
      this.account.busy += 1;
      image.due = now() + answer.retry_after_ms;
      return;
    }
    this.#open.delete(answer.id);
    if (answer.type === "accepted") this.account.accepted += 1;
    else if (answer.type === "duplicate" && !answer.differs) this.account.duplicate += 1;
    else this.#reject(answer.id, answer.code ?? "duplicate", answer.reason ?? "another image has this id");
  }

  #reject(id, code, reason) {
    this.account.rejected += 1;
    console.error(`${id}: ${code}: ${reason}`);
  }
}

const [endpoint, source, folder] = process.argv.slice(2);
if (!folder) {
  console.error("use: publish.js ENDPOINT SOURCE FOLDER, with FOLDER/BOARD_TYPE/SERIAL/DESIGNATOR.COMPONENT.png");
  process.exit(2);
}
const publisher = new Publisher(endpoint, source);
try {
  for (const type of (await readdir(folder)).sort()) {
    for (const serial of (await readdir(path.join(folder, type))).sort()) {
      for (const name of (await readdir(path.join(folder, type, serial))).sort()) {
        const [designator, ...component] = path.parse(name).name.split(".");
        if (component.length === 0) continue;
        await publisher.publish(
          {id: `${serial}/${designator}`, board: {type, serial}, component: component.join("."), designator},
          await readFile(path.join(folder, type, serial, name)),
        );
      }
    }
  }
  await publisher.finish();
  console.log(JSON.stringify(publisher.account));
  process.exitCode = publisher.account.rejected || publisher.account.sent === 0 ? 1 : 0; // 0 sent: an empty folder
} catch (error) {
  console.error(`publish: ${error.message}`);
  process.exitCode = 1;
}
await publisher.close();
