// Reclaimer: a scheduler with a queue and a gauge of its own gains eviction.
package main

import (
	"flag"
	"log"
	"net"
	"net/http"
	"strconv"
	"time"

	corepb "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/examples/internal/passthrough"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/flowcontrol"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:9002", "address to serve ext_proc on")
	places := flag.Int("places", 20, "requests that the model servers run at once")
	flag.Parse()
	l, err := net.Listen("tcp", *listen)
	if err != nil {
		log.Fatal(err)
	}
	ev := evictor.New()
	sched := newScheduler(ev, *places, flowcontrol.WithObserver(func(d flowcontrol.Decision) { log.Print(d) }))
	go sched.run(time.Tick(time.Millisecond))

	s := grpc.NewServer()
	extprocpb.RegisterExternalProcessorServer(s, extproc.Wrap(server{sched: sched}))
	log.Fatal(s.Serve(l))
}

// server is an ext_proc server whose requests wait for their turn.
type server struct {
	passthrough.Server
	sched *scheduler
}

func (s server) Process(st extprocpb.ExternalProcessor_ProcessServer) error {
	return s.Server.Process(&turn{st, s.sched})
}

// turn is a stream whose request headers are not answered before it is dispatched.
type turn struct {
	extprocpb.ExternalProcessor_ProcessServer
	sched *scheduler
}

func (t *turn) Recv() (*extprocpb.ProcessingRequest, error) {
	req, err := t.ExternalProcessor_ProcessServer.Recv()
	if h := req.GetRequestHeaders(); err == nil && h != nil {
		err = t.sched.wait(t.Context(), priority(h.GetHeaders().GetHeaders()))
	}
	return req, err
}

// priority stands for what your gateway trusts; a client's header is nothing of the kind.
func priority(hs []*corepb.HeaderValue) int {
	for _, h := range hs {
		if http.CanonicalHeaderKey(h.GetKey()) == "X-Priority" {
			p, _ := strconv.Atoi(string(h.GetRawValue()))
			return p
		}
	}
	return 0
}

// describe says what a request of some priority is.
func describe(priority int) abort.Request { return abort.Request{Priority: priority} }
