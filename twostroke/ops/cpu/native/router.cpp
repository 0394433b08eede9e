// The same routes, to the last bit, as those of the Python form, which says why: standing.py, holdings.py, ranks.py and
// search.py in twostroke/cluster. Names and their order here are those of that form.
#include "router_holdings.h"

#include <cmath>
#include <memory>

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr int64_t kBlock = 16;  // tokens

// ---- ranks.py ------------------------------------------------------------------------------------------------------

constexpr double kSteps = 12, kLeast = 1.0 / (1 << 20), kFirst = kSteps * -20 - 1;
constexpr int kRanks = 1024;  // the last one for all that would take 2^65 seconds and more

class CostRanks {
  public:
    explicit CostRanks(int length) : length_(length), tokens_((double)(64 << 4 * length)), ranks_(kRanks) {}

    void changed(Worker& worker) {
        if (worker.at[length_].changed) return;
        worker.at[length_].changed = true;
        changed_.push_back(&worker);
    }

    void drop(Worker& worker) {
        RankPlace& at = worker.at[length_];
        if (at.changed) changed_.erase(std::find(changed_.begin(), changed_.end(), &worker));
        at.changed = false;
        if (at.rank) leave(worker);
    }

    void least(size_t count, std::vector<Worker*>& found) {
        for (Worker* worker : changed_) order(*worker);
        changed_.clear();
        for (size_t word = 0; word < kRanks / 64; ++word)
            for (uint64_t left = filled_[word]; left; left &= left - 1)
                for (Worker* one = ranks_[word * 64 + (size_t)__builtin_ctzll(left)].first; one; one = one->at[length_].after) {
                    if (!count--) return;
                    found.push_back(one);
                }
    }

  private:
    struct Rank {
        Worker *first = nullptr, *last = nullptr;  // in the order in which they came
    };
    const int length_;
    const double tokens_;
    std::vector<Worker*> changed_;  // since they were last ordered
    std::vector<Rank> ranks_;
    uint64_t filled_[kRanks / 64] = {};  // a bit for each rank that has workers

    int rank_of(const Worker& worker) const {
        const double own = worker.load.token * tokens_, done = worker.wait + own;
        const double cost = (done > worker.place ? done : worker.place) + own * (double)worker.streams + worker.load.step;
        if (!(cost > kLeast)) return 1;
        const double rank = kSteps * std::log2(cost) - kFirst;
        return rank < kRanks - 1 ? (int)rank : kRanks - 1;
    }

    void order(Worker& worker) {
        RankPlace& at = worker.at[length_];
        at.changed = false;
        const int rank = rank_of(worker);
        if (rank == at.rank && worker.open) return;
        if (at.rank) leave(worker);
        if (worker.open) join(worker, rank);
    }

    void join(Worker& worker, int number) {
        Rank& rank = ranks_[(size_t)number];
        RankPlace& at = worker.at[length_];
        at.rank = number;
        at.before = rank.last;
        at.after = nullptr;
        (rank.last ? rank.last->at[length_].after : rank.first) = &worker;
        rank.last = &worker;
        filled_[number / 64] |= 1ull << number % 64;
    }

    void leave(Worker& worker) {
        RankPlace& at = worker.at[length_];
        Rank& rank = ranks_[(size_t)at.rank];
        (at.before ? at.before->at[length_].after : rank.first) = at.after;
        (at.after ? at.after->at[length_].before : rank.last) = at.before;
        if (!rank.first) filled_[at.rank / 64] ^= 1ull << at.rank % 64;
        at.rank = 0;
    }
};

// ---- search.py -----------------------------------------------------------------------------------------------------

constexpr size_t kFew = 12, kWriters = 3, kHelpers = 2;
constexpr int64_t kChunk = 512;

struct PromptCost {
    double cost, done;
    int64_t cached, tokens, fetched;
    Worker* worker;
};

struct RouteChoice {
    double least = kInf;
    PromptCost prefill = {}, decode = {};
    Worker* richest = nullptr;

    void consider(double cost, const PromptCost& first, const PromptCost& writer) {
        if (cost < least) least = cost, prefill = first, decode = writer;
    }
    bool exists() const { return prefill.worker; }
    double first_token() const {
        return prefill.worker == decode.worker ? std::max(prefill.done, prefill.worker->place) : prefill.done;
    }
};

}  // namespace

class RouterCore {
  public:
    Worker* find(int32_t number) const {
        return number >= 0 && (size_t)number < workers_.size() ? workers_[(size_t)number].get() : nullptr;
    }

    void update(int32_t number, const WorkerReport& report) {
        Worker* worker = find(number);
        if (!worker) {
            if (number < 0) return;
            if ((size_t)number >= workers_.size()) workers_.resize((size_t)number + 1);
            workers_[(size_t)number] = std::make_unique<Worker>(number, report);
            live_.push_back(worker = workers_[(size_t)number].get());
        } else {
            if (report.writes != worker->load.writes || report.helps != worker->load.helps) drop(*worker);
            worker->report(report);
        }
        changed(*worker);
    }

    void pause(Worker& worker) {
        worker.open = false;
        changed(worker);
    }

    void lost(Worker& worker) {
        holdings_.drop(worker);
        drop(worker);
        live_.erase(std::find(live_.begin(), live_.end(), &worker));
        workers_[(size_t)worker.number].reset();
    }

    void stored(Worker& worker, const Names& names) { holdings_.keep(worker, names, worker.cached(names)); }

    RouterAnswer choose(const Names& names, const RouterAsk& ask) {
        look_for(names, ask);
        weigh_holdings(names);
        RouteChoice chosen = best(names.count, ask, true);
        if (!chosen.exists()) return {-1, -1, -1, 0, 0, 0, 0, 0, 0, 0};
        if (chosen.first_token() > ask.due) {
            const RouteChoice soonest = best(names.count, ask, false);
            if (soonest.exists() && soonest.first_token() <= ask.due) chosen = soonest;
        }
        return take(chosen, names);
    }

  private:
    std::vector<std::unique_ptr<Worker>> workers_;  // by number
    std::vector<Worker*> live_;                     // in the order in which they joined
    Holdings holdings_;
    CostRanks writers_[kLengths] = {CostRanks(0), CostRanks(1), CostRanks(2)};
    CostRanks helpers_[kLengths] = {CostRanks(0), CostRanks(1), CostRanks(2)};
    // Of the request that is being routed:
    std::vector<Worker*> asked_;   // workers that come into question
    std::vector<int64_t> cached_;  // leading blocks that each of them has
    Worker* richest_ = nullptr;    // the one that has the most
    int64_t most_ = 0;
    std::vector<int32_t> holders_;
    std::vector<PromptCost> costs_;
    std::vector<const PromptCost*> able_;  // to compute the prompt for another worker, those of the least cost first

    void changed(Worker& worker) {
        for (CostRanks& ranks : worker.load.writes ? writers_ : helpers_) ranks.changed(worker);
    }

    void drop(Worker& worker) {
        for (CostRanks& ranks : worker.load.writes ? writers_ : helpers_) ranks.drop(worker);
    }

    void look_for(const Names& names, const RouterAsk& ask) {
        asked_.clear();
        if (live_.size() <= kFew) {
            asked_ = live_;
        } else {
            const int length = ask.tokens < 256 ? 0 : ask.tokens < 4096 ? 1 : 2;
            writers_[length].least(kWriters, asked_);
            if (names.count) {
                helpers_[length].least(kHelpers, asked_);
                holdings_.most(names, [&](int32_t number) { return find(number) ? find(number)->wait : kInf; }, holders_);
                for (const int32_t number : holders_)
                    if (Worker* one = find(number); one && std::find(asked_.begin(), asked_.end(), one) == asked_.end())
                        asked_.push_back(one);
            }
        }
        const auto aside = [&](const Worker* one) { return !one->open || one->number == ask.but; };
        asked_.erase(std::remove_if(asked_.begin(), asked_.end(), aside), asked_.end());
    }

    void weigh_holdings(const Names& names) {
        richest_ = nullptr;
        most_ = 0;
        cached_.assign(asked_.size(), 0);
        int64_t guess = 0;
        for (size_t i = 0; i < asked_.size() && names.count; ++i) {
            if (!asked_[i]->has(names[0])) continue;
            guess = cached_[i] = asked_[i]->cached(names, guess);
            if (guess > most_) richest_ = asked_[i], most_ = guess;
        }
    }

    // others: what other answers wait counts too.
    PromptCost cost_of(Worker& worker, int64_t cached, const RouterAsk& ask, bool others) const {
        const int64_t length = std::max<int64_t>(1, ask.tokens);
        const double wait = worker.wait, token = worker.load.token;
        int64_t tokens = length - cached * kBlock, fetched = 0;
        double own = tokens > 1 ? token * (double)tokens : token;
        double done = wait + own;
        if (cached < most_ && ask.fetch_latency >= 0) {
            const int64_t left = std::max<int64_t>(1, length - most_ * kBlock);
            const double coming = std::min(richest_->wait, (double)kChunk * richest_->load.token) + ask.fetch_latency;
            const double there = coming + (double)(most_ - cached) * ask.fetch_block;
            const double sooner = (wait > there ? wait : there) + (double)left * token;
            if (sooner < done) tokens = left, fetched = most_ - cached, own = (double)left * token, done = sooner;
        }
        const double cost = others ? done + (double)worker.streams * own : done;
        return {cost, done, cached, std::max<int64_t>(1, tokens), fetched, &worker};
    }

    RouteChoice best(int64_t blocks, const RouterAsk& ask, bool others) {
        costs_.clear();
        for (size_t i = 0; i < asked_.size(); ++i) costs_.push_back(cost_of(*asked_[i], cached_[i], ask, others));
        find_able(blocks, ask.apart);
        double lost = kInf;
        for (const PromptCost* one : able_) lost = std::min(lost, one->cost - one->done);
        RouteChoice chosen;
        chosen.richest = richest_;
        for (const PromptCost& prompt : costs_) {
            if (!prompt.worker->load.writes) continue;
            const double step = prompt.worker->load.step, place = prompt.worker->place;
            if (!(ask.apart && !able_.empty()))
                chosen.consider(prompt.done >= place ? prompt.cost + step : place + prompt.cost - prompt.done + step, prompt, prompt);
            if (place + step + lost < chosen.least) best_helper(blocks, ask, prompt, chosen);
        }
        return chosen;
    }

    void find_able(int64_t blocks, bool apart) {
        able_.clear();
        if (!blocks) return;
        const auto before = [](const PromptCost* one, const PromptCost* other) {
            return one->cost != other->cost ? one->cost < other->cost : one->worker->number < other->worker->number;
        };
        for (const PromptCost& prompt : costs_)
            if (prompt.worker->load.helps) insert_sorted(able_, &prompt, before);
        const auto writes = [](const PromptCost* one) { return one->worker->load.writes; };
        if (apart && !std::all_of(able_.begin(), able_.end(), writes))
            able_.erase(std::remove_if(able_.begin(), able_.end(), writes), able_.end());
    }

    // The best worker to compute a prompt that this one writes the answer of.
    void best_helper(int64_t blocks, const RouterAsk& ask, const PromptCost& prompt, RouteChoice& chosen) const {
        const double step = prompt.worker->load.step, place = prompt.worker->place + step;
        const int64_t lacking = blocks - prompt.cached;
        const double after = lacking ? ask.latency + (double)lacking * ask.block + step : step;
        for (const PromptCost* helper : able_) {
            if (helper->cost + after >= chosen.least) break;
            if (helper == &prompt) continue;
            const double ready = helper->done + after;
            chosen.consider((ready > place ? ready : place) + helper->cost - helper->done, *helper, prompt);
            if (place == step) break;
        }
    }

    // ---- router.py -------------------------------------------------------------------------------------------------

    RouterAnswer take(const RouteChoice& chosen, const Names& names) {
        const PromptCost& prefill = chosen.prefill;
        Worker &first = *prefill.worker, &writer = *chosen.decode.worker;
        const double second = chosen.least - prefill.cost + prefill.done;
        const double cost = second + (double)(first.streams * prefill.tokens) * first.load.token;
        const double ttft = chosen.first_token();  // before it is sent
        RouterAnswer answer = {first.number, writer.number, -1, 0, ttft, second, cost, prefill.cached, 0, prefill.fetched};
        if (prefill.fetched) answer.source = chosen.richest->number;
        send(first, prefill.tokens, &first == &writer, names, prefill.cached);
        if (&first != &writer) {
            answer.sent = names.count - chosen.decode.cached;
            send(writer, 0, 1, names, chosen.decode.cached);
        }
        return answer;
    }

    void send(Worker& worker, int64_t tokens, int64_t streams, const Names& names, int64_t cached) {
        worker.take(tokens, streams);
        holdings_.keep(worker, names, cached);
        changed(worker);
    }
};

RouterCore* make_router() { return new RouterCore; }

void free_router(RouterCore* router) { delete router; }

void router_update(RouterCore& router, int32_t number, const WorkerReport& report) { router.update(number, report); }

void router_pause(RouterCore& router, int32_t number) {
    if (Worker* worker = router.find(number)) router.pause(*worker);
}

void router_lost(RouterCore& router, int32_t number) {
    if (Worker* worker = router.find(number)) router.lost(*worker);
}

void router_stored(RouterCore& router, int32_t number, const Names& names) {
    if (Worker* worker = router.find(number)) router.stored(*worker, names);
}

int64_t router_cached(RouterCore& router, int32_t number, const Names& names) {
    Worker* worker = router.find(number);
    return worker ? worker->cached(names) : 0;
}

WorkerStanding router_standing(RouterCore& router, int32_t number) {
    const Worker* worker = router.find(number);
    if (!worker) return {};
    return {worker->wait, worker->place, worker->sent_tokens, worker->sent_streams, (int64_t)worker->held.size(), worker->blocks};
}

RouterAnswer router_choose(RouterCore& router, const Names& names, const RouterAsk& ask) { return router.choose(names, ask); }
