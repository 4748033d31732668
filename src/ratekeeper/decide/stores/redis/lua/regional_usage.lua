-- Return what this region knows of a subject, without a change.
--
-- KEYS[3]  the state of the subject
-- ARGV[2]  the gate
--
-- The reply is an array: the time; the units of this region in the last window; an array of region,
-- units, and when it said so, for each other region; and the two levels of each limit. It is empty if
-- this region has no share, and has one text if the state cannot be read.

if not shares or share_n == 0 then
    return {}
end
local state, gate, changed = opened(KEYS[3], ARGV[2], false)
if not state then
    return {gate}
end
local n, d = share_of(state, gate)
if changed then
    save(KEYS[3], state, gate, n, d)
end
local seen, all, _, step = {}, seen_of(state)
for p = 0, #all - 1, step do
    for _, place in ipairs({SEEN_NAME, SEEN_PART, SEEN_AT}) do
        seen[#seen + 1] = all[p + place]
    end
end
local part = sum_of_slots(state[PART], state[PART + 1], state[PART + 2], gate[LONGEST])
local found = {now, part, seen}
for i = 1, #state - LEDGERS do
    local known, own = levels(gate, GATE_FIRST + (i - 1) * GATE_STEP, state[LEDGERS + i], n, d)
    found[#found + 1], found[#found + 2] = known, own
end
return found
