# A fast shutdown ends in seconds: with a request that hangs, and with a synchronous standby that is gone.

use strict;
use warnings;

use PostgreSQL::Test::Utils;
use RetrysafeCluster;
use Test::More;
use Time::HiRes qw(time);

my $node = retrysafe_node('main', allows_streaming => 1);
$node->start;
my $file = add_destination($node, 'd');
emit($node, 'e1');
ok(defined delivered_within($file, 10, 'e1'), 'a first event');

tell($node, 'd', 'hang');
emit($node, 'hanging');
$node->poll_query_until('postgres',
	q(SELECT count(*) = 1 FROM retrysafe.outbox_workers WHERE state = 'publishing')) or die 'nothing hangs';
my $began = time;
$node->stop('fast');
cmp_ok(time - $began, '<', 10, 'fast shutdown with a request that hangs');
$node->start;
forget_told($node, 'd');
ok(defined delivered_within($file, 10, qw(e1 hanging)), 'the event comes after the restart');

# Progress is recorded without waiting for the standby, so neither delivery nor the shutdown hangs on it.
$node->append_conf('postgresql.conf', "synchronous_standby_names = 'gone'\nsynchronous_commit = on");
$node->reload;
$node->safe_psql('postgres',
	q(SET synchronous_commit = local; SELECT retrysafe.outbox_emit(NULL, 'e2', 't', '{}')));
ok(defined delivered_within($file, 10, qw(e1 hanging e2)), 'delivery without the synchronous standby');
$node->poll_query_until('postgres', 'SELECT bool_and(sent_at IS NOT NULL) FROM retrysafe.outbox_events');
$began = time;
$node->stop('fast');
cmp_ok(time - $began, '<', 10, 'fast shutdown without the synchronous standby');

$node->start;
balance($node, 'd', $file);
no_crash($node);

done_testing();
