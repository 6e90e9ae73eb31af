-- Shared by all scripts. Keys: 1 epoch, 2 revision, 3 holders, 4 entries, 5 expiries (ms), 6 changes (revision of
-- each lease), 7 removals (revision of each end), 8 floor (changes up to it are no longer known one by one).
local EPOCH, REVISION, HOLDERS, ENTRIES = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local EXPIRIES, CHANGES, REMOVALS, FLOOR = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local MOST_REMOVALS = 1000

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local now_us = string.format('%.0f', time[1] * 1000000 + time[2])

-- Numbers of 20 digits compare as strings; Lua's own numbers would round sequences above 2^53.
local function digits(number)
    return string.rep('0', 20 - #number) .. number
end

local function current_epoch(candidate)
    redis.call('SET', EPOCH, candidate, 'NX')
    return redis.call('GET', EPOCH)
end

local function drop(server_id)
    redis.call('HDEL', HOLDERS, server_id)
    redis.call('HDEL', ENTRIES, server_id)
    redis.call('ZREM', EXPIRIES, server_id)
    redis.call('ZREM', CHANGES, server_id)
    redis.call('ZADD', REMOVALS, redis.call('INCR', REVISION), server_id)
    if redis.call('ZCARD', REMOVALS) > MOST_REMOVALS then
        local oldest = redis.call('ZPOPMIN', REMOVALS)
        redis.call('SET', FLOOR, oldest[2])
    end
end

local function expire()
    for _, server_id in ipairs(redis.call('ZRANGEBYSCORE', EXPIRIES, '-inf', now_ms, 'LIMIT', 0, 1000)) do
        drop(server_id)
    end
end
