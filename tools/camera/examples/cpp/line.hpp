// What both examples need of the wire (docs/protocol.md): frames, headers, and CURVE keys for a line on another PC.
#pragma once

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>
#include <zmq.hpp>
#include <zmq_addon.hpp>

using nlohmann::json;

// With keys from `coserve keys new` in the environment (Z85, 40 characters each) the connection is encrypted.
inline void use_keys(zmq::socket_t& socket) {
    const char* server = std::getenv("COSERVE_SERVER_KEY");
    const char* own_public = std::getenv("COSERVE_PUBLIC_KEY");
    const char* own_secret = std::getenv("COSERVE_SECRET_KEY");
    if (server == nullptr) return;
    if (own_public == nullptr || own_secret == nullptr)
        throw std::runtime_error("COSERVE_SERVER_KEY needs COSERVE_PUBLIC_KEY and COSERVE_SECRET_KEY beside it");
    socket.set(zmq::sockopt::curve_serverkey, server);
    socket.set(zmq::sockopt::curve_publickey, own_public);
    socket.set(zmq::sockopt::curve_secretkey, own_secret);
}

// Frames of a message to the daemon: "CS1", one JSON object, and for an image its bytes.
inline void send(zmq::socket_t& socket, const json& header, const std::string* payload = nullptr) {
    socket.send(zmq::str_buffer("CS1"), zmq::send_flags::sndmore);
    socket.send(zmq::buffer(header.dump()), payload ? zmq::send_flags::sndmore : zmq::send_flags::none);
    if (payload) socket.send(zmq::buffer(*payload), zmq::send_flags::none);
}

// The next message's frames, or none within `wait`.
inline std::vector<zmq::message_t> receive(zmq::socket_t& socket, std::chrono::milliseconds wait) {
    std::vector<zmq::message_t> frames;
    zmq::pollitem_t item{socket.handle(), 0, ZMQ_POLLIN, 0};
    if (zmq::poll(&item, 1, wait) > 0 && !zmq::recv_multipart(socket, std::back_inserter(frames)))
        frames.clear();
    return frames;
}
