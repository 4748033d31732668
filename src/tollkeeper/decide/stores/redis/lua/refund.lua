-- Give units back to every limit of a rule, never beyond an untouched quota.
--
-- ARGV[2]  the units
-- ARGV[3]  the time in microseconds; absent or empty: the server's

if not raw then
    return 0
end
local units = tonumber(ARGV[2])
local dropped, truncated = {}, {}

-- One limit's state with the units back: last, a, b; or nothing, where none is left.
local function refunded(g, last, a, b)
    local kind, window = gate[g + KIND], gate[g + WINDOW]
    if kind == BUCKET then
        local used = used_now(g, last, a, now) - units * MICROS_PER_UNIT
        if used > 0 then
            return max(last, now), used
        end
    elseif kind == FIXED then
        if now - fmod(now, window) <= last - fmod(last, window) and a > units then
            return last, a - units
        end
    elseif kind == COUNTER then
        local at, previous, current = rolled(window, last, a, b, now)
        local from_current = min(current, units)
        current = current - from_current
        previous = previous - min(previous, units - from_current)
        if previous > 0 or current > 0 then
            return at, previous, current
        end
    else
        local log, per_chunk = log_of(g), fmod(b, 1024)
        local kept = (b - per_chunk) / 1024
        local finish = a + kept - min(units, kept)
        -- From the chunk that the next time goes to, or the one after it.
        local first = finish > a and math.ceil(finish / per_chunk) or floor(a / per_chunk)
        truncated[#truncated + 1] = {log, first, floor((a + kept - 1) / per_chunk)}
        if finish > a then
            return log.time_at(per_chunk, finish - 1), a, (finish - a) * 1024 + per_chunk
        end
    end
end

local changed = false
for g = GATE_FIRST, #gate, GATE_STEP do
    local p = place(gate[g + ID])
    if p then
        local wide = width(gate[g + ID]) == 4
        local last, a, b = refunded(g, held[1] - held[p + 1], held[p + 2], wide and held[p + 3])
        if last then
            held[p + 1], held[p + 2] = held[1] - last, a
            if wide then
                held[p + 3] = b
            end
        else
            dropped[p] = true
        end
        changed = true
    end
end
if changed then
    write(without(dropped))
    for _, log in ipairs(truncated) do
        log[1].drop(log[2], log[3])
    end
end
return 1
