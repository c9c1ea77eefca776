// What both examples need of the wire (docs/protocol.md): frames, and CURVE keys for a line on another PC.

// With keys from `coserve keys new` in the environment (Z85, 40 characters each) the connection is encrypted.
export function keys() {
  const {COSERVE_SERVER_KEY: server, COSERVE_PUBLIC_KEY: own, COSERVE_SECRET_KEY: secret} = process.env;
  if (!server) return {};
  if (!own || !secret) throw new Error("COSERVE_SERVER_KEY needs COSERVE_PUBLIC_KEY and COSERVE_SECRET_KEY beside it");
  return {curveServerKey: server, curvePublicKey: own, curveSecretKey: secret};
}

// A message to the daemon: "CS1", one JSON object, and for an image its bytes.
export const frames = (header, ...payload) => ["CS1", JSON.stringify(header), ...payload];

// Buffer of JSON to object.
export const read = (frame) => JSON.parse(frame.toString("utf8"));
