# A fast shutdown ends in seconds: with a request that hangs, which comes again with its id, and with a synchronous
# standby that is gone.

use strict;
use warnings;

use IO::Socket::INET;
use PostgreSQL::Test::Utils;
use RetrysafeCluster;
use Test::More;
use Time::HiRes qw(time);

my $node = retrysafe_node('main', allows_streaming => 1);
$node->append_conf('postgresql.conf', "retrysafe.allowed_addresses = '127.0.0.1'");
$node->start;
my $file = add_destination($node, 'd');
emit($node, 'e1');
ok(defined delivered_within($file, 10, 'e1'), 'a first event');

# A web server that takes a request, and answers when it is told to.
my $listener = IO::Socket::INET->new(Listen => 16, LocalAddr => '127.0.0.1', Timeout => 30) or die "no socket: $!";

sub next_request
{
	my $connection = $listener->accept or die "no request: $!";
	my %request = (connection => $connection);
	$request{line} = <$connection>;
	while ((my $line = <$connection>) =~ /\S/)
	{
		$line =~ /^([^:]+): *(.*?)\r\n$/ or die "no header: $line";
		$request{ lc $1 } = $2;
	}
	read $connection, $request{body}, $request{'content-length'};
	return \%request;
}

sub answer
{
	my ($request, $status) = @_;
	print { $request->{connection} } "HTTP/1.1 $status Status\r\nConnection: close\r\n\r\n";
	close $request->{connection};
}

my $url = 'http://127.0.0.1:' . $listener->sockport . '/';
$node->safe_psql('postgres', qq(SELECT retrysafe.outbox_create_destination('web', 'http', '{"url": "$url"}')));
emit($node, 'hanging');
my $first = next_request();
my $began = time;
$node->stop('fast');
cmp_ok(time - $began, '<', 10, 'fast shutdown with a request that hangs');
$node->start;
my $second = next_request();
answer($second, 204);
my $id = $node->safe_psql('postgres', q(SELECT event_id FROM retrysafe.outbox_events WHERE event_key = 'hanging'));
is("$first->{'ce-id'} $second->{'ce-id'}", "$id $id", 'the event comes again after the restart, with its id');
is($second->{body}, $first->{body}, 'and is the same');
ok( $node->poll_query_until('postgres', 'SELECT bool_and(sent_at IS NOT NULL) FROM retrysafe.outbox_events'),
	'and is recorded');
$node->safe_psql('postgres', q(SELECT retrysafe.outbox_drop_destination('web')));
ok(defined delivered_within($file, 10, qw(e1 hanging)), 'the other destination went on');

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
