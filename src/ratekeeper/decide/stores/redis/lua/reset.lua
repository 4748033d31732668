-- Delete a rule's states and grants of a subject. Units that are held stay used: nodes may still spend
-- them, or give them back.
--
-- ARGV[3]  the time in microseconds; empty: the server's

if not raw then
    return 0
end
dropped = {}
local logs = {}
for g = GATE_FIRST, #gate, GATE_STEP do
    local kind, id = gate[g + KIND], gate[g + ID]
    local p, grant = place(id), place(-id)
    if grant then
        dropped[grant] = true
    end
    if p then
        local last, units, per_chunk = held[1] - held[p + 1], 0, 0
        if kind == LOG then
            per_chunk = fmod(held[p + 3], 1024)
            local kept, start = (held[p + 3] - per_chunk) / 1024, held[p + 2]
            if kept > 0 then
                local last_chunk = floor((start + kept - 1) / per_chunk)
                logs[#logs + 1] = {log_of(g), floor(start / per_chunk), last_chunk}
            else
                last = 0
            end
        end
        local at = max(now, last)
        if holding then -- of a log, also those that end now: see the algorithm
            local u1, _, u2 = live_holds(id, kind == LOG and at - 1 or at)
            units = u1 + u2
        end
        held[p + 1], held[p + 2] = held[1] - at, units
        if kind == BUCKET then
            held[p + 2] = units * MICROS_PER_UNIT
        elseif kind ~= FIXED then
            held[p + 2], held[p + 3] = 0, kind == COUNTER and units or per_chunk
        end
        dropped[p] = units == 0 or nil
    end
end
local refused = keep(without(held, dropped))
for _, log in ipairs(logs) do
    log[1].drop(log[2], log[3])
end
return refused or 1
