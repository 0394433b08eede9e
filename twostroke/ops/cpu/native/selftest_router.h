// The part of selftest.cpp for the router: random orders. Its routes are compared with those of the Python form in
// tests/cluster/test_native_router.py; here a sanitizer looks on.
#pragma once

uint64_t block_name(uint64_t prompt, int place) { return (prompt * 1000 + (uint64_t)place + 1) * 0xD6E8FEB86659FD93u; }

// Its first blocks are those of other prompts.
std::vector<uint64_t> prompt_names(Random& random) {
    const int count = random.below(200), shared = random.below(3) * 40, group = random.below(4), own = 4 + group + 4 * random.below(20);
    std::vector<uint64_t> names;
    for (int place = 0; place < count; ++place) names.push_back(block_name((uint64_t)(place < shared ? group : own * 3 + shared / 40), place));
    return names;
}

void check_router(int workers) {
    Random random{17};
    RouterCore* router = ts_router_new();
    std::vector<float> seen;
    for (int turn = 0; turn < 4000; ++turn) {
        const int32_t number = random.below(workers);
        const std::vector<uint64_t> names = prompt_names(random);
        const char* bytes = (const char*)names.data();
        const int64_t count = (int64_t)names.size();
        const int role = random.below(3), what = turn < workers ? 0 : random.below(10);
        const WorkerReport report = {role != 0, role != 1, random.below(4000), random.below(9), 1 + random.below(8), random.below(9) / 8192.0, random.below(9) / 1024.0, random.below(9) / 8.0, 300 * (1 + random.below(4))};
        const RouterAsk ask = {random.below(2), random.below(workers), count * 16 + 5, random.below(8) / 2.0, 0.002, 0.0005, random.below(2) - 0.5, 0.0002};
        if (what < 3) ts_router_update(router, turn < workers ? turn : number, (const char*)&report);
        if (what == 3) ts_router_pause(router, number);
        if (what == 4) ts_router_lost(router, number - 1);
        if (what == 5) ts_router_stored(router, number, bytes, count);
        if (what < 6) continue;
        RouterAnswer answer;
        ts_router_choose(router, bytes, count, (const char*)&ask, &answer);
        WorkerStanding standing;
        ts_router_standing(router, number, &standing);
        for (const double value : {answer.ttft, answer.second, answer.cost, standing.wait, standing.place}) seen.push_back((float)value);
        for (const int64_t value : {(int64_t)answer.prefill, (int64_t)answer.decode, (int64_t)answer.source, answer.cached, answer.sent, answer.fetched, standing.names, standing.blocks, ts_router_cached(router, number, bytes, count)}) seen.push_back((float)value);
    }
    ts_router_free(router);
    printf("router of %d %016llx\n", workers, (unsigned long long)checksum(seen));
}
