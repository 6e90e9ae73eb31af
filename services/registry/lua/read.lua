-- Arguments: known epoch, known revision, candidate for a new epoch.
-- Returns {epoch, revision, 1 if full, {server id, expiry in ms, entry, ...}, {removed id, ...}}.
local known_revision = tonumber(ARGV[2])
local epoch = current_epoch(ARGV[3])
local revision = tonumber(redis.call('GET', REVISION) or '0')
if epoch == ARGV[1] and known_revision > revision then
    -- The store fell back to an older state, from which numbers would be given twice.
    epoch = ARGV[3]
    redis.call('SET', EPOCH, epoch)
end
expire()
revision = tonumber(redis.call('GET', REVISION) or '0')
local floor = tonumber(redis.call('GET', FLOOR) or '0')
local full = epoch ~= ARGV[1] or known_revision < floor
local since = full and '-inf' or '(' .. ARGV[2]

local leases, ids = {}, redis.call('ZRANGEBYSCORE', CHANGES, since, '+inf')
for _, server_id in ipairs(ids) do
    leases[#leases + 1] = server_id
    leases[#leases + 1] = redis.call('ZSCORE', EXPIRIES, server_id)
    leases[#leases + 1] = redis.call('HGET', ENTRIES, server_id)
end
local removals = full and {} or redis.call('ZRANGEBYSCORE', REMOVALS, since, '+inf')
return {epoch, revision, full and 1 or 0, leases, removals}
