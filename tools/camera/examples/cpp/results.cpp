// Prints every result from SEQ on, one JSON object a line, in order and without a gap, whatever is restarted.
//
//   g++ -std=c++17 -O2 results.cpp -lzmq -o results
//   ./results tcp://127.0.0.1:5570 tcp://127.0.0.1:5571 SEQ[@EPOCH] [UNTIL]
//
// The live stream may lose messages while we are away or slow. Each has a `seq` without gaps, so we see that, and ask
// the intake for what is missing (results_since). Store the last `seq` with what you made of it, and the `epoch` that
// is printed on stderr: they are your position. A database that was restored from a backup has another epoch and gives
// the same numbers to other results: then we read everything that it has, also results that we read before.
// With UNTIL the program ends after that seq. Exit status: 0 done, 1 trouble, 2 wrong use.

#include <chrono>
#include <iostream>
#include <limits>

#include "line.hpp"

using std::chrono::milliseconds;

class Results {
  public:
    Results(const std::string& intake, const std::string& stream, const std::string& position, long until)
        : ask_(context_, zmq::socket_type::dealer), hear_(context_, zmq::socket_type::sub), intake_(intake),
          seq_(std::stol(position)), until_(until) {
        const auto at = position.find('@');
        if (at != std::string::npos) epoch_ = position.substr(at + 1);
        hear_.set(zmq::sockopt::subscribe, "");  // or "board/" alone, or "inspection/TYPE/SERIAL/"
        use_keys(hear_);
        hear_.connect(stream);
        connect();
    }

    void run() {
        heard_epoch(ask({{"type", "hello"}}));
        catch_up();
        while (seq_ < until_) {
            const auto frames = receive(hear_, milliseconds{1000});
            if (frames.size() != 2) continue;  // nothing for a second, not even a heartbeat: the daemon is away
            const json message = json::parse(frames[1].to_string_view());
            heard_epoch(message);  // a heartbeat's
            const long seq = message.at("seq");
            const bool is_result = message.contains("verdict") || message.contains("prompt_tokens");
            if (is_result && seq == seq_ + 1) {
                take(message);
            } else if (seq > seq_) {
                catch_up();  // a gap, or a heartbeat that says that there is more than we have
            }
        }
    }

  private:
    void take(const json& message) {
        if (seq_ >= until_) return;
        std::cout << message << std::endl;
        seq_ = message.at("seq");
    }

    void heard_epoch(const json& message) {
        const std::string now = message.value("epoch", epoch_);  // a line before 1.1 sends none
        if (now == epoch_) return;
        if (!epoch_.empty()) seq_ = 0;  // another database: its numbers mean other results
        epoch_ = now;
        std::cerr << "epoch " << epoch_ << ", after seq " << seq_ << std::endl;
    }

    void connect() {
        ask_ = zmq::socket_t(context_, zmq::socket_type::dealer);
        ask_.set(zmq::sockopt::linger, 0);
        use_keys(ask_);
        ask_.connect(intake_);
    }

    json ask(const json& question) {
        while (true) {
            send(ask_, question);
            const auto frames = receive(ask_, milliseconds{5000});
            if (frames.size() == 2) return json::parse(frames[1].to_string_view());
            connect();  // the question may be lost with a daemon that ended: a new connection, ask again
        }
    }

    void catch_up() {
        for (bool more = true; more && seq_ < until_;) {
            const json page = ask({{"type", "results_since"}, {"seq", seq_}, {"limit", 1000}});
            if (page.at("type") != "results") throw std::runtime_error(page.dump());
            for (const auto& message : page.at("items")) take(message);
            more = page.at("more");
        }
    }

    zmq::context_t context_;
    zmq::socket_t ask_, hear_;
    std::string intake_;
    std::string epoch_;
    long seq_, until_;
};

int main(int count, char** words) {
    if (count != 4 && count != 5) {
        std::cerr << "use: results INTAKE RESULTS SEQ[@EPOCH] [UNTIL]\n";
        return 2;
    }
    try {
        Results(words[1], words[2], words[3], count == 5 ? std::stol(words[4]) : std::numeric_limits<long>::max()).run();
    } catch (const std::exception& error) {
        std::cerr << "results: " << error.what() << "\n";
        return 1;
    }
}
