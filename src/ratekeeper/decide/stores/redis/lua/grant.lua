-- Add extra units on top of every limit of a rule.
--
-- ARGV[2]  the units
-- ARGV[3]  the time in microseconds; empty: the server's
-- ARGV[4]  for how many microseconds; empty: one window of each limit
-- ARGV[5]  the most units that a grant can have

local units, units_max = tonumber(ARGV[2]), tonumber(ARGV[5])
local need_us = 0

for g = GATE_FIRST, #gate, GATE_STEP do
    local id = -gate[g + ID]
    local p = place(id)
    local total, ends = units, now + (ARGV[4] ~= '' and tonumber(ARGV[4]) or gate[g + WINDOW])
    if p and now < held[p + 3] then
        total, ends = total + held[p + 2], max(ends, held[p + 3])
    end
    p = p or #held + 1
    held[p], held[p + 1], held[p + 2], held[p + 3] = id, 0, min(total, units_max), ends
    need_us = max(need_us, ends - now)
end
keep(held, need_us, need_us)
return 1
