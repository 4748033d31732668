-- Return what this region knows of a subject, without a change.
--
-- KEYS[3]  the state of the subject
-- ARGV[2]  the gate
--
-- The reply is an array: the time; the share, as two numbers; the units of this region in the last
-- window; the ledgers; and an array of region, units, and when it said so, for each region. It is empty
-- if this region has no share, and has one text if the state cannot be read.

if not shares or shares[SHARE_NOW] == 0 then
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
local part = sum_of_slots(state, PART, longest_window(gate))
return {now, n, d, part, {unpack(state, LEDGERS + 1)}, seen}
