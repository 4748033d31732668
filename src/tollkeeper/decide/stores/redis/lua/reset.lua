-- Delete a rule's states, grants and holds of a subject.
--
-- ARGV[3]  the time in microseconds; empty: the server's

if not raw then
    return 0
end
local dropped, logs = {}, {}
for g = GATE_FIRST, #gate, GATE_STEP do
    local p = place(held, gate[g + ID])
    for group = 0, 2 do -- a grant and two holds
        local q = place(held, -gate[g + ID] - group * 8589934592)
        if q then
            dropped[q] = true
        end
    end
    if p then
        dropped[p] = true
        if gate[g + KIND] == LOG then
            local per_chunk = fmod(held[p + 3], 1024)
            local kept = (held[p + 3] - per_chunk) / 1024
            local start = held[p + 2]
            local last = floor((start + kept - 1) / per_chunk)
            logs[#logs + 1] = {log_of(g), floor(start / per_chunk), last}
        end
    end
end
local refused = keep(without(held, dropped))
for _, log in ipairs(logs) do
    log[1].drop(log[2], log[3])
end
return refused or 1
