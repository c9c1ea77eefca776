// Publishes a folder of images, BOARD_TYPE/SERIAL/DESIGNATOR.COMPONENT.png, and prints an account of the answers.
//
//   apt-get install g++ libzmq3-dev cppzmq-dev nlohmann-json3-dev
//   g++ -std=c++17 -O2 publish.cpp -lzmq -o publish
//   ./publish tcp://127.0.0.1:5570 camera-1 pictures
//
// What a publisher has to do is all here: stay within the credit, send again what is not answered, wait when the
// daemon is busy, and forget an image only when it was accepted (or a duplicate, which was accepted before).
// Exit status: 0 the daemon holds every image, 1 it refused some or does not answer, 2 wrong use.

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>

#include "line.hpp"

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;  // never the clock on the wall, which somebody may set
using std::chrono::milliseconds;

constexpr milliseconds silence{5000};    // without an answer for so long, an image is sent again
constexpr milliseconds patience{60000};  // without any answer at all for so long, we give up

struct Open {
    json header;
    std::string payload;
    Clock::time_point due;  // when it is sent, or sent again
    bool was_sent = false;
};

struct Account {
    long sent = 0, accepted = 0, duplicate = 0, rejected = 0, busy = 0, resent = 0;
};

class Publisher {
  public:
    Publisher(const std::string& endpoint, std::string source)
        : socket_(context_, zmq::socket_type::dealer), source_(std::move(source)), heard_(Clock::now()) {
        socket_.set(zmq::sockopt::linger, 0);
        socket_.set(zmq::sockopt::sndhwm, 0);  // the credit is the limit
        use_keys(socket_);
        socket_.connect(endpoint);
        send(socket_, {{"type", "hello"}, {"source", source_}});
    }

    // Send one image. Waits while the credit is used up.
    void publish(json header, std::string payload) {
        while (open_.size() >= credit_) step();
        const std::string id = header.at("id");
        account.sent++;
        if (payload.size() > max_payload_) return reject(id, "too_large", "more bytes than the daemon takes");
        header["type"] = "inspect";
        header["source"] = source_;
        if (open_.empty()) heard_ = Clock::now();
        open_[id] = {std::move(header), std::move(payload), Clock::now()};
        send_due();
        while (take(milliseconds{0})) {}
    }

    // Wait until every image has its answer.
    void finish() {
        while (!open_.empty()) step();
    }

    Account account;

  private:
    void step() {
        if (Clock::now() - heard_ > patience)
            throw std::runtime_error("no daemon answers: is the daemon running, is this its endpoint, is our key allowed?");
        auto wake = Clock::now() + milliseconds{500};
        for (const auto& [id, image] : open_) wake = std::min(wake, image.due);
        const auto wait = std::chrono::duration_cast<milliseconds>(wake - Clock::now());
        if (take(std::max(milliseconds{1}, wait)))
            while (take(milliseconds{0})) {}
        send_due();
    }

    void send_due() {
        const auto now = Clock::now();
        for (auto& [id, image] : open_) {
            if (image.due > now) continue;
            send(socket_, image.header, &image.payload);
            account.resent += image.was_sent;
            image.was_sent = true;
            image.due = now + silence;
        }
    }

    bool take(milliseconds wait) {
        const auto frames = receive(socket_, wait);
        if (frames.size() != 2) return false;
        heard_ = Clock::now();
        const json answer = json::parse(frames[1].to_string_view());
        const std::string type = answer.at("type");
        credit_ = answer.value("credit", 1U);
        if (type == "welcome") max_payload_ = answer.value("max_payload_bytes", max_payload_);
        const std::string id = answer.at("id").is_string() ? answer.at("id") : "";
        const auto image = open_.find(id);
        if (image == open_.end()) return true;  // the welcome, or the second answer to what was sent twice
        if (type == "busy") {
            account.busy++;
            image->second.due = heard_ + milliseconds{answer.value("retry_after_ms", 100)};
            return true;
        }
        open_.erase(image);
        if (type == "accepted") {
            account.accepted++;
        } else if (type == "duplicate" && !answer.value("differs", false)) {
            account.duplicate++;
        } else {
            reject(id, answer.value("code", "duplicate"), answer.value("reason", "another image has this id"));
        }
        return true;
    }

    void reject(const std::string& id, const std::string& code, const std::string& reason) {
        account.rejected++;
        std::cerr << id << ": " << code << ": " << reason << "\n";
    }

    zmq::context_t context_;
    zmq::socket_t socket_;
    std::string source_;
    std::map<std::string, Open> open_;
    std::size_t credit_ = 0;  // nothing until the daemon's welcome says more
    std::size_t max_payload_ = std::size_t{64} << 20;
    Clock::time_point heard_;
};

int main(int count, char** words) {
    if (count != 4 || !fs::is_directory(words[3])) {
        std::cerr << "use: publish ENDPOINT SOURCE FOLDER, with FOLDER/BOARD_TYPE/SERIAL/DESIGNATOR.COMPONENT.png\n";
        return 2;
    }
    try {
        std::vector<fs::path> files;
        for (const auto& entry : fs::recursive_directory_iterator(words[3]))
            if (entry.is_regular_file() && entry.path().stem().has_extension()) files.push_back(entry.path());
        std::sort(files.begin(), files.end());
        Publisher publisher(words[1], words[2]);
        for (const auto& file : files) {
            const std::string serial = file.parent_path().filename().string();
            const std::string type = file.parent_path().parent_path().filename().string();
            const std::string designator = file.stem().stem().string();
            const std::string component = file.stem().extension().string().substr(1);
            std::ifstream stream(file, std::ios::binary);
            std::string bytes{std::istreambuf_iterator<char>(stream), {}};
            publisher.publish({{"id", serial + "/" + designator},
                               {"board", {{"type", type}, {"serial", serial}}},
                               {"component", component},
                               {"designator", designator}},
                              std::move(bytes));
        }
        publisher.finish();
        const Account& a = publisher.account;
        std::cout << json{{"sent", a.sent}, {"accepted", a.accepted}, {"duplicate", a.duplicate},
                          {"rejected", a.rejected}, {"busy", a.busy}, {"resent", a.resent}}
                  << std::endl;
        return a.rejected || a.sent == 0 ? 1 : 0;  // nothing sent: the folder was empty, or another
    } catch (const std::exception& error) {
        std::cerr << "publish: " << error.what() << "\n";
        return 1;
    }
}
