// Prints every result from SEQ on, one JSON object a line, in order and without a gap, whatever is restarted.
//
//   node results.js tcp://127.0.0.1:5570 tcp://127.0.0.1:5571 SEQ[@EPOCH] [UNTIL]
//
// The live stream may lose messages while we are away or slow. Each has a `seq` without gaps, so we see that, and ask
// the intake for what is missing (results_since). Store the last `seq` with what you made of it, and the `epoch` that
// is printed on stderr: they are your position. A database that was restored from a backup has another epoch and gives
// the same numbers to other results: then we read everything that it has, also results that we read before.
// With UNTIL the program ends after that seq. Exit status: 0 done, 1 trouble, 2 wrong use.

import {Dealer, Subscriber} from "zeromq";
import {frames, keys, read} from "./line.js";

const [intake, stream, from, until = Infinity] = process.argv.slice(2);
if (from === undefined) {
  console.error("use: results.js INTAKE RESULTS SEQ[@EPOCH] [UNTIL]");
  process.exit(2);
}
let [seq, epoch] = from.split("@");
seq = Number(seq);
let asker = connect();

function connect() {
  const dealer = new Dealer({linger: 0, receiveTimeout: 5_000, ...keys()});
  dealer.connect(intake);
  return dealer;
}

function take(message) {
  if (seq >= until) return;
  console.log(JSON.stringify(message));
  seq = message.seq;
}

async function ask(question) {
  for (;;) {
    try {
      await asker.send(frames(question));
      return read((await asker.receive())[1]);
    } catch {
      asker.close(); // the question may be lost with a daemon that ended: a new connection, ask again
      asker = connect();
    }
  }
}

function heardEpoch(now) {
  if (now === undefined || now === epoch) return; // a line before 1.1 sends none
  if (epoch) seq = 0; // another database: its numbers mean other results
  epoch = now;
  console.error(`epoch ${epoch}, after seq ${seq}`);
}

async function catchUp() {
  for (let more = true; more && seq < until; ) {
    const page = await ask({type: "results_since", seq, limit: 1000});
    if (page.type !== "results") throw new Error(JSON.stringify(page));
    page.items.forEach(take);
    more = page.more;
  }
}

const hearer = new Subscriber(keys());
hearer.connect(stream);
hearer.subscribe(""); // or "board/" alone, or "inspection/TYPE/SERIAL/"
try {
  heardEpoch((await ask({type: "hello"})).epoch);
  await catchUp();
  while (seq < until) {
    const message = read((await hearer.receive())[1]);
    heardEpoch(message.epoch); // a heartbeat's
    const isResult = "verdict" in message || "prompt_tokens" in message;
    if (isResult && message.seq === seq + 1) take(message);
    else if (message.seq > seq) await catchUp(); // a gap, or a heartbeat that says that there is more than we have
  }
} catch (error) {
  console.error(`results: ${error.message}`);
  process.exitCode = 1;
}
hearer.close();
asker.close();
