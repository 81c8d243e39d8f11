// Wrap: an existing ext_proc server gains eviction, without a change.
package main

import (
	"context"
	"flag"
	"log"
	"net"
	"time"

	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/examples/internal/passthrough"
	"github.com/extevict/extevict/extproc"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:9002", "address to serve ext_proc on")
	flag.Parse()
	l, err := net.Listen("tcp", *listen)
	if err != nil {
		log.Fatal(err)
	}
	s := grpc.NewServer()
	var yours extprocpb.ExternalProcessorServer = passthrough.Server{}

	ev := evictor.New()
	extprocpb.RegisterExternalProcessorServer(s, extproc.Wrap(yours, extproc.WithTracker(ev, describe)))

	go evictEachMinute(ev)
	log.Fatal(s.Serve(l))
}

// describe says what a request is, from what your gateway trusts.
func describe(context.Context, *extprocpb.ProcessingRequest) (abort.Request, bool) {
	return abort.Request{Priority: -1, Endpoint: "10.0.0.7:8000"}, true
}

// evictEachMinute stands for your scheduler.
func evictEachMinute(ev *evictor.Evictor) {
	for range time.Tick(time.Minute) {
		victims, err := ev.Evict(context.Background(), evictor.Demand{N: 1, Below: 0, Reason: abort.Preempted})
		log.Printf("evicted %d of %d: %v", len(victims), len(victims)+ev.Len(), err)
	}
}
