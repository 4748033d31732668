-- Logs: each is a string of its own, a ring of the times of its units. `state.lua` is before it.
--
-- The key has the hash tag of the subject's bucket, so both are in one slot of a cluster. The string is
--
--     version   1 byte: 0, or 1 if units are granted, leased or owed
--     ends      the second when the log ends, in 4 bytes
--     last      the newest time, in microseconds, in 7 bytes
--     start, count, slots   3 bytes each: where the oldest time is, how many there are, and for how many
--                           there is room
--     a time in each slot, 7 bytes
--     with version 1: units (4 bytes) and end (7) of the grant, and of both groups of holds; units owed (4)
--
-- A ring that is full, or three quarters empty, is written anew, a quarter larger than its times. So its
-- memory follows the times that are alive. The string is set as a whole then: Redis doubles the
-- memory of a string that grows in place.

local HEAD_BYTES, TIME_BYTES, MORE_BYTES, BLOCK = 21, 7, 37, 128
local rings = {}

--@ if slots
--@ slots
--@ end

-- Return a log. `new` are packed times behind those that are stored.
local function ring_of(key)
    if rings[key] then
        return rings[key]
    end
    local head = call('GETRANGE', key, 0, HEAD_BYTES - 1)
    local ring = {key = key, new = '', ends = 0, last = -1, start = 0, count = 0, slots = 0}
    if head ~= '' then
        local version
        version, ring.ends, ring.last, ring.start, ring.count, ring.slots =
            struct.unpack('>I1I4I7I3I3I3', head)
        if version > 1 then
            error('LAYOUT')
        end
        if version == 1 then
            local tail = HEAD_BYTES + ring.slots * TIME_BYTES
            ring.extra =
                {struct.unpack('>I4I7I4I7I4I7I4', call('GETRANGE', key, tail, tail + MORE_BYTES - 1))}
        end
        ring.last = ring.count > 0 and ring.last or -1
    end
    rings[key] = ring
    return ring
end

local function size_of(ring)
    return ring.count + #ring.new / TIME_BYTES
end

-- Return the packed times of some positions, counted from the oldest time.
local function times(ring, from, count)
    local packed, stored = '', max(min(count, ring.count - from), 0)
    if stored > 0 then
        local slot = (ring.start + from) % ring.slots
        local first, at = min(stored, ring.slots - slot), HEAD_BYTES + slot * TIME_BYTES
        packed = call('GETRANGE', ring.key, at, at + first * TIME_BYTES - 1)
        if stored > first then
            local finish = HEAD_BYTES + (stored - first) * TIME_BYTES - 1
            packed = packed .. call('GETRANGE', ring.key, HEAD_BYTES, finish)
        end
    end
    if count > stored then
        local behind = from + stored - ring.count
        packed = packed .. string.sub(ring.new, behind * TIME_BYTES + 1, (behind + count - stored) * TIME_BYTES)
    end
    return packed
end

local function time_at(ring, position)
    return (struct.unpack('>I7', times(ring, position, 1)))
end

-- Return how many times are not after `oldest`. Usually they are few: the search begins at them.
local function dead_of(ring, oldest)
    local low, high = 0, size_of(ring)
    if high == 0 or ring.last <= oldest then
        return high
    end
    local all, probe = high, 0
    while low < high do
        if time_at(ring, probe) > oldest then
            high = probe
        else
            low = probe + 1
        end
        probe = high == all and min(2 * low, high - 1) or floor((low + high) / 2)
    end
    return low
end

local function drop_oldest(ring, count)
    local stored = min(count, ring.count)
    ring.count = ring.count - stored
    ring.start = ring.slots > 0 and (ring.start + stored) % ring.slots or 0
    ring.new = string.sub(ring.new, (count - stored) * TIME_BYTES + 1)
end

local function append(ring, time, units)
    if units > 0 then
        ring.new, ring.last = ring.new .. string.rep(struct.pack('>I7', time), units), time
    end
end

-- Append the units whose hold has ended by `at`, and that are after `ring.oldest`.
local function append_ended(ring, extra, at)
    for group = 3, 5, 2 do
        if extra[group + 1] > ring.oldest and extra[group + 1] <= at then
            append(ring, extra[group + 1], extra[group])
        end
    end
end

-- Remove all times from a position on, and put others there.
local function replace_from(ring, position, packed)
    local kept = max(position - ring.count, 0) * TIME_BYTES
    ring.count, ring.new = min(ring.count, position), string.sub(ring.new, 1, kept) .. packed
    local size = size_of(ring)
    ring.last = size > 0 and time_at(ring, size - 1) or -1
end

-- A log that owes is the beginning of a longer sequence, in which each of its last entries comes again one
-- window later until the debt is used up: see sliding_window_log.py. `extend` sets the length of the
-- sequence and a function from a position to a time; how many entries have come by `at`, and how many of
-- these have left the window; and what is owed then.
local function extend(ring, extra, at)
    local size, ends, more, last_ends = size_of(ring), extra[4], extra[5], extra[6]
    local debt = min(extra[OWED], ring.bound)
    local filled = min(debt, max(ring.capacity - size - extra[3] - more, 0))
    local first, last = size + filled + extra[3] + more, size > 0 and ring.last or ends - ring.window + 1
    local again = min(first, ring.capacity)
    -- Return where an entry comes from, the end of its run, the time of that run, if it is not in the log,
    -- and how much later the entry is.
    ring.origin = function(position)
        local rounds = max(floor((position - first) / again) + 1, 0)
        if rounds > 0 then
            position = first - again + (position - first) % again
        end
        local later = rounds * ring.window
        if position < size then
            return position, size, nil, later
        elseif position < size + filled then
            return position, size + filled, last, later
        elseif position < first - more then
            return position, first - more, ends, later
        end
        return position, first, last_ends, later
    end
    ring.entry = function(position)
        local origin, _, time, later = ring.origin(position)
        return (time or time_at(ring, origin)) + later
    end
    local function until_after(high, time)
        local low = 0
        while low < high do
            local middle = floor((low + high) / 2)
            if ring.entry(middle) > time then
                high = middle
            else
                low = middle + 1
            end
        end
        return low
    end
    ring.length = first - filled + debt
    ring.due = until_after(ring.length, at)
    ring.gone = until_after(ring.due, at - ring.window)
    ring.owed = ring.length - ring.due - (ends > at and extra[3] or 0) - (last_ends > at and more or 0)
end

-- Return packed times with so much added to each. A run of equal ones, as a settlement makes them, is
-- written at once.
local function shifted(packed, later)
    local count = #packed / TIME_BYTES
    local first, last = struct.unpack('>I7', packed), struct.unpack('>I7', packed, #packed - TIME_BYTES + 1)
    if first == last then
        return string.rep(struct.pack('>I7', first + later), count)
    end
    local format = '>' .. string.rep('I7', count)
    local moved = {struct.unpack(format, packed)}
    for place = 1, count do
        moved[place] = moved[place] + later
    end
    return struct.pack(format, unpack(moved, 1, count))
end

-- Put the debt into a log that has entered it, and drop what has left the window. The times of the log
-- are copied in blocks: one by one, a million of them would hold up the server for two seconds.
local function enter(ring, extra, at)
    local size = size_of(ring)
    local packed = {times(ring, min(ring.gone, size), max(min(ring.due, size) - ring.gone, 0))}
    local position = max(ring.gone, size)
    while position < ring.due do
        local origin, finish, time, later = ring.origin(position)
        local count = min(finish - origin, ring.due - position)
        if time then
            packed[#packed + 1] = string.rep(struct.pack('>I7', time + later), count)
        else
            count = min(count, BLOCK)
            packed[#packed + 1] = shifted(times(ring, origin, count), later)
        end
        position = position + count
    end
    replace_from(ring, 0, table.concat(packed))
    extra[OWED] = ring.owed
    live_holds(extra, at)
    ring.entry, ring.origin = nil, nil
end

-- Write a log that is needed until `ring.need`. A log has at least as many slots as it has times, and at
-- most as many as its limit.
local function save(ring)
--@ if slots
    if ring.pending then
--@ if check
        save_slots(ring)
--@ end
        return
    end
--@ end
    local size, extra, need = size_of(ring), ring.extra, ring.need
    local version, more = 0, ''
    if extra and extra[1] + extra[3] + extra[5] + extra[OWED] > 0 then
        version, more = 1, struct.pack('>I4I7I4I7I4I7I4', unpack(extra, 1, OWED))
    elseif size == 0 then
        call('DEL', ring.key)
        rings[ring.key] = nil
        return
    end
    local key, before = ring.key, ring.ends
    --@ ends
    ring.ends = min(ends, ENDS_MAX)
    local anew = size > ring.slots or 4 * size < ring.slots - 16 or ring.slots == 0
    if anew then
        local packed = times(ring, 0, size)
        ring.slots, ring.start = max(size, min(ring.capacity, ceil(size * 1.25) + 3)), 0
        ring.new = packed .. string.rep('\0', (ring.slots - size) * TIME_BYTES)
        ring.count = 0
    end
    local slot = ring.slots > 0 and (ring.start + ring.count) % ring.slots or 0
    local head = struct.pack('>I1I4I7I3I3I3', version, ring.ends, max(ring.last, 0), ring.start, size, ring.slots)
    if anew then
        call('SET', ring.key, head .. ring.new .. more, 'KEEPTTL')
    else
        local first = min(#ring.new, (ring.slots - slot) * TIME_BYTES)
        call('SETRANGE', ring.key, 0, head)
        if first > 0 then
            call('SETRANGE', ring.key, HEAD_BYTES + slot * TIME_BYTES, string.sub(ring.new, 1, first))
        end
        if #ring.new > first then
            call('SETRANGE', ring.key, HEAD_BYTES, string.sub(ring.new, first + 1))
        end
        if version == 1 then
            call('SETRANGE', ring.key, HEAD_BYTES + ring.slots * TIME_BYTES, more)
        end
    end
    ring.count, ring.new = size, ''
    --@ expiry
end
