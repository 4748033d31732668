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
local seen = {}
for region, each in pairs(state[SEEN]) do
    seen[#seen + 1], seen[#seen + 2], seen[#seen + 3] = region, each[SEEN_PART], each[SEEN_AT]
end
return {now, n, d, sum_of_slots(state[PART], longest_window(gate)), state[LEDGERS], seen}
