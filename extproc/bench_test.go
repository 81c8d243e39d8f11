package extproc_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/internal/compare"
)

// still is the cheapest stream there is: what is left is Wrap's own cost.
type still struct {
	ctx  context.Context
	head []*request // the first messages
	body *request   // all others
	n, i int
}

func (s *still) Context() context.Context     { return s.ctx }
func (s *still) SetHeader(metadata.MD) error  { return nil }
func (s *still) SendHeader(metadata.MD) error { return nil }
func (s *still) SetTrailer(metadata.MD)       {}
func (s *still) RecvMsg(any) error            { return nil }
func (s *still) Send(*response) error         { return nil }
func (s *still) SendMsg(any) error            { return nil }
func (s *still) Recv() (*request, error) {
	s.i++
	switch {
	case s.i > s.n:
		return nil, io.EOF
	case s.i <= len(s.head):
		return s.head[s.i-1], nil
	}
	return s.body, nil
}

// loop is a server's usual loop, with one reply for all.
func loop(recv func(process) (*request, error)) serverFunc {
	r := reply(responseBody("", false))
	return func(s process) error {
		for {
			if _, err := recv(s); err != nil {
				return nil
			}
			if err := s.Send(r); err != nil {
				return err
			}
		}
	}
}

func recv(s process) (*request, error)        { return s.Recv() }
func recvOrAbort(s process) (*request, error) { return s.(*extproc.Stream).RecvOrAbort() }

// BenchmarkMessage is Recv + Send of one message, against the bare loop. Budget: 100
// ns more and no allocation; through the reader 1 us.
func BenchmarkMessage(b *testing.B) {
	head := []*request{requestHeaders(streamed)}
	run := func(srv extprocpb.ExternalProcessorServer) func(int) {
		body := responseBody("data: token\n\n", false)
		return func(n int) {
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			srv.Process(&still{ctx: ctx, head: head, body: body, n: n})
		}
	}
	b.Run("Wrap", func(b *testing.B) { compare.Run(b, 10_000, run(loop(recv)), run(extproc.Wrap(loop(recv)))) })
	b.Run("RecvOrAbort", func(b *testing.B) {
		compare.Run(b, 10_000, run(loop(recv)), run(extproc.Wrap(loop(recvOrAbort))))
	})
	// From here on it keeps track of where events end.
	head = append(head, responseHeaders())
	b.Run("Wrap, SSE", func(b *testing.B) { compare.Run(b, 10_000, run(loop(recv)), run(extproc.Wrap(loop(recv)))) })
}

// BenchmarkStream is a whole stream of one message, against the bare server. Budget:
// 1.5 us and 9 allocations more if the server watches its context, 0.6 us and 3 if not.
func BenchmarkStream(b *testing.B) {
	watch := func(s process) error { _ = s.Context().Done(); return loop(recv)(s) }
	run := func(srv extprocpb.ExternalProcessorServer) func(int) {
		head := requestHeaders(streamed)
		return func(n int) {
			for range n {
				ctx, cancel := context.WithCancel(context.Background()) // as grpc's
				srv.Process(&still{ctx: ctx, head: []*request{head}, n: 1})
				cancel()
			}
		}
	}
	b.Run("plain", func(b *testing.B) { compare.Run(b, 1000, run(loop(recv)), run(extproc.Wrap(loop(recv)))) })
	b.Run("watching", func(b *testing.B) {
		compare.Run(b, 1000, run(serverFunc(watch)), run(extproc.Wrap(serverFunc(watch))))
	})
}

// fleet is an ext_proc server on loopback TCP, with clients.
type fleet struct {
	client extprocpb.ExternalProcessorClient
	opened chan process
	stop   func()
}

func newFleet(wrapped bool, ev *evictor.Evictor) *fleet {
	f := &fleet{opened: make(chan process, 1)}
	var srv extprocpb.ExternalProcessorServer = serverFunc(func(s process) error {
		ev.TrackRequests(s.Context(), abort.Request{Priority: -1})
		f.opened <- s
		return loop(recv)(s)
	})
	if wrapped {
		srv = extproc.Wrap(srv)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	gs := grpc.NewServer()
	extprocpb.RegisterExternalProcessorServer(gs, srv)
	go gs.Serve(l)
	cc, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		panic(err)
	}
	f.client = extprocpb.NewExternalProcessorClient(cc)
	f.stop = func() { cc.Close(); gs.Stop() }
	return f
}

// open opens a stream and returns both ends of it.
func (f *fleet) open() (extprocpb.ExternalProcessor_ProcessClient, process) {
	c, err := f.client.Process(context.Background())
	if err != nil {
		panic(err)
	}
	if err := c.Send(requestHeaders(streamed)); err != nil {
		panic(err)
	}
	s := <-f.opened
	if _, err := c.Recv(); err != nil {
		panic(err)
	}
	return c, s
}

// close is what Envoy does after an answer.
func hangUpClient(c extprocpb.ExternalProcessor_ProcessClient) {
	c.CloseSend()
	for {
		if _, err := c.Recv(); err != nil {
			return
		}
	}
}

// BenchmarkDecisionToClient is the time from the decision until the client has the
// answer, over loopback TCP, against a Send in a goroutine of its own. Budget: ratio 1.15.
func BenchmarkDecisionToClient(b *testing.B) {
	answer := &response{Response: &extprocpb.ProcessingResponse_ImmediateResponse{ImmediateResponse: extproc.Response(&abort.Error{Reason: abort.Preempted}, nil)}}
	for _, idle := range []int{1, 1000, 10_000} {
		b.Run(fmt.Sprintf("idle=%d", idle), func(b *testing.B) {
			var none, ev evictor.Evictor
			bare, ours := newFleet(false, &none), newFleet(true, &ev)
			defer bare.stop()
			defer ours.stop()
			for range idle {
				bare.open()
				_, s := ours.open()
				ev.TrackRequests(s.Context(), abort.Request{}) // of a priority that is not evicted
			}
			once := func(f *fleet, end func(process)) time.Duration {
				c, s := f.open()
				defer hangUpClient(c)
				t := time.Now()
				end(s)
				if _, err := c.Recv(); err != nil {
					b.Fatal(err)
				}
				return time.Since(t)
			}
			var ratios, bases, all []float64
			for b.Loop() {
				x := once(bare, func(s process) { go s.Send(answer) })
				y := once(ours, func(process) {
					if vs, _ := ev.Evict(context.Background(), evictor.Demand{N: 1, Reason: abort.Preempted}); len(vs) != 1 {
						b.Fatal("no victim")
					}
				})
				ratios, bases, all = append(ratios, float64(y)/float64(x)), append(bases, float64(x)), append(all, float64(y))
			}
			report(b, ratios, bases, all)
		})
	}
}

func report(b *testing.B, ratios, bases, all []float64) {
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(compare.Median(ratios), "ratio")
	b.ReportMetric(compare.Median(all)/compare.Median(bases), "ratio-of-medians")
	b.ReportMetric(compare.Median(bases)/1e3, "us/base-p50")
	b.ReportMetric(compare.Median(all)/1e3, "us/p50")
	b.ReportMetric(compare.Percentile(all, 99)/1e3, "us/p99")
}

// BenchmarkThousandAtOnce is the time until the last of 1,000 clients has its answer,
// against as many goroutines that just Send. Budget: ratio 1.6.
func BenchmarkThousandAtOnce(b *testing.B) {
	const n = 1000
	answer := &response{Response: &extprocpb.ProcessingResponse_ImmediateResponse{ImmediateResponse: extproc.Response(&abort.Error{Reason: abort.Preempted}, nil)}}
	var none, ev evictor.Evictor
	bare, ours := newFleet(false, &none), newFleet(true, &ev)
	defer bare.stop()
	defer ours.stop()
	once := func(f *fleet, end func([]process)) time.Duration {
		cs, ss := make([]extprocpb.ExternalProcessor_ProcessClient, n), make([]process, n)
		for i := range n {
			cs[i], ss[i] = f.open()
		}
		var wg sync.WaitGroup
		t := time.Now()
		for _, c := range cs {
			wg.Go(func() { c.Recv() })
		}
		end(ss)
		wg.Wait()
		d := time.Since(t)
		for _, c := range cs {
			wg.Go(func() { hangUpClient(c) })
		}
		wg.Wait()
		return d
	}
	var ratios, bases, all []float64
	for b.Loop() {
		x := once(bare, func(ss []process) {
			for _, s := range ss {
				go s.Send(answer)
			}
		})
		y := once(ours, func([]process) {
			if vs, _ := ev.Evict(context.Background(), evictor.Demand{N: n, Reason: abort.Preempted}); len(vs) != n {
				b.Fatalf("%d victims", len(vs))
			}
		})
		ratios, bases, all = append(ratios, float64(y)/float64(x)), append(bases, float64(x)), append(all, float64(y))
	}
	report(b, ratios, bases, all)
}
