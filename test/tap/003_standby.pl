# Nothing publishes on a standby. After promotion work starts within seconds, and ids stay what they were.

use strict;
use warnings;

use PostgreSQL::Test::Utils;
use RetrysafeCluster;
use Test::More;
use Time::HiRes qw(time);

my $primary = retrysafe_node('primary', allows_streaming => 1);
$primary->start;
my $file = add_destination($primary, 'd');
emit($primary, 'e1');
ok(defined delivered_within($file, 10, 'e1'), 'the primary delivers');
$primary->poll_query_until('postgres', 'SELECT bool_and(sent_at IS NOT NULL) FROM retrysafe.outbox_events');

$primary->backup('base');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'base', has_streaming => 1);
$standby->start;
$primary->safe_psql('postgres', q(SELECT retrysafe.outbox_pause('d')));
emit($primary, 'e2');
my $id = $primary->safe_psql('postgres', q(SELECT event_id FROM retrysafe.outbox_events WHERE event_key = 'e2'));
$primary->wait_for_catchup($standby, 'replay', $primary->lsn('insert'));

is( $standby->safe_psql('postgres', q(SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'retrysafe %')),
	'0', 'neither launcher nor worker on the standby');
my ($status, undef, $error) = $standby->psql('postgres', 'SELECT retrysafe.outbox_run_worker()');
isnt($status, 0, 'no worker by hand either');
like($error, qr/cannot execute outbox_run_worker\(\) during recovery/, 'and it says why');

$primary->stop('immediate');
my $began = time;
$standby->promote;
$standby->safe_psql('postgres', q(SELECT retrysafe.outbox_resume('d')));
ok(defined delivered_within($file, 10, qw(e1 e2)), 'the promoted standby delivers');
cmp_ok(time - $began, '<', 10, 'within seconds');
my ($line) = grep { / e2 / } split /\n/, slurp_file($file);
like($line, qr/ \Q$id\E /, 'with the id that the event had on the primary');

emit($standby, 'e3');
ok(defined delivered_within($file, 10, qw(e1 e2 e3)), 'and goes on');

balance($standby, 'd', $file);
no_crash($primary, $standby);

done_testing();
